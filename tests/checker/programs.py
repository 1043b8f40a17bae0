"""Random well-typed programs: each step is one that the checker accepts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    broadcast,
    check_program,
    convert,
    make_mesh,
    ppermute,
    reduce_scatter,
    reinterpret,
    shard_map,
)

AXES: Final = ("i", "j")
LENGTH: Final = 4
IN_SPECS: Final = (P("i"), P("j"), P(("i", "j")), P(), P())

_AXIS: list[str] = ["i"]
"""The axis over which the step that runs communicates."""


def _axis() -> str:
    return _AXIS[-1]


Value = Callable[..., Tensor]


def _last() -> int:
    return axis_size(_axis()) - 1


def _ranks() -> Tensor:
    return axis_index(_axis()) + 1.0


def _inner(f: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    return lambda x: torch.func.grad(lambda w: f(w).sum())(x)


def _scattered(x: Tensor) -> Tensor:
    return reduce_scatter(torch.cat([x, x + _ranks()] * 3)[: axis_size(_axis()) * LENGTH], _axis())


def _written(x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(LENGTH, dtype=x.dtype)
    buffer = buffer + 0
    buffer[:2] = x[:2]
    buffer[1:3] += y[:2]
    return buffer


def _written_functionally(x: Tensor, y: Tensor) -> Tensor:
    return torch.cat([x[:1], x[1:2] + y[:1], y[1:2], torch.zeros(1, dtype=x.dtype)])


UNARY: Final[dict[str, Value]] = {
    "sin": torch.sin,
    "neg": torch.neg,
    "double": lambda x: 2 * x,
    "plus one": lambda x: x + 1,
    "detach": lambda x: x.detach(),
    "flip": lambda x: x.flip(0),
    "scale by rank": lambda x: x * _ranks(),
    "shift by rank": lambda x: x + _ranks(),
    "square": lambda x: x * x,
    "cumsum": lambda x: x.cumsum(0),
    "softmax": lambda x: torch.softmax(x, 0),
    "mask": lambda x: torch.where(x > 0, x, 0),
    "zero": torch.zeros_like,
    "inner gradient of sin": _inner(torch.sin),
    "inner gradient of a sum to I": _inner(lambda w: all_reduce(w.sin(), _axis(), dst=I)),
    "inner gradient of a linear sum to I": _inner(
        lambda w: all_reduce(w * 3 + _ranks(), _axis(), dst=I)
    ),
    "inner gradient of a sum to R": _inner(lambda w: all_reduce(w.sin(), _axis(), dst=R)),
    "inner gradient beside a rank": _inner(lambda w: w * w + _ranks()),
    "inner gradient of both": _inner(
        lambda w: all_reduce((w + _ranks()).sin(), _axis(), dst=I) + w * w
    ),
    "all_reduce to I": lambda x: all_reduce(x, _axis(), dst=I),
    "all_reduce to R": lambda x: all_reduce(x, _axis(), dst=R),
    "mean to I": lambda x: all_reduce(x, _axis(), dst=I, op="mean"),
    "max to I": lambda x: all_reduce(x, _axis(), dst=I, op="max"),
    "max to R": lambda x: all_reduce(x, _axis(), dst=R, op="max"),
    "gather to I": lambda x: all_gather(x, _axis(), dst=I)[:LENGTH],
    "gather to R": lambda x: all_gather(x, _axis(), dst=R)[-LENGTH:],
    "scatter": _scattered,
    "permute": lambda x: ppermute(x, _axis(), [(0, _last())]),
    "broadcast to I": lambda x: broadcast(x, _axis(), _last(), dst=I),
    "broadcast to R": lambda x: broadcast(x, _axis(), _last(), dst=R),
    "I to R": lambda x: convert(x, _axis(), src=I, dst=R),
    "R to I": lambda x: convert(x, _axis(), src=R, dst=I),
    "I to P": lambda x: convert(x, _axis(), src=I, dst=Partial),
    "R to P": lambda x: convert(x, _axis(), src=R, dst=Partial),
    "R as V": lambda x: reinterpret(x, _axis(), src=R, dst=V),
    "V as P": lambda x: reinterpret(x, _axis(), src=V, dst=Partial),
    "R as P": lambda x: reinterpret(x, _axis(), src=R, dst=Partial),
}

BINARY: Final[dict[str, Value]] = {
    "add": torch.add,
    "sub": torch.sub,
    "mul": torch.mul,
    "div": lambda x, y: x / (1 + y.exp()),
    "outer": lambda x, y: torch.outer(x, y).sum(0),
    "cat": lambda x, y: torch.cat([x, y])[2 : 2 + LENGTH],
    "where": lambda x, y: torch.where(x > y, x, y),
    "select": lambda x, y: torch.where(x.detach() > 0, y, 0),
    "clip": lambda x, y: x * y.detach(),
    "write": _written,
    "inner product": lambda x, y: torch.func.grad(lambda w: (w * w * y).sum())(x),
    "inner product, reduced": lambda x, y: torch.func.grad(
        lambda w: all_reduce(w * w * y, _axis(), dst=I).sum()
    )(x),
}


@dataclass(frozen=True)
class Step:
    """One operation on earlier values."""

    name: str
    operands: tuple[int, ...]
    axis: str

    def __call__(self, values: Sequence[Tensor], functional: bool) -> Tensor:
        table = UNARY if len(self.operands) == 1 else BINARY
        operation = table[self.name]
        if operation is _written and functional:
            operation = _written_functionally
        _AXIS.append(self.axis)
        try:
            return operation(*[values[i] for i in self.operands])
        finally:
            _AXIS.pop()


@dataclass
class Program:
    """Steps, and the spec by which each step's value leaves."""

    steps: list[Step] = field(default_factory=list)
    specs: list[P] = field(default_factory=list)
    functional: bool = False

    def body(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for step in self.steps:
            values.append(step(values, self.functional))
        return tuple(values[len(inputs) :])

    def mapped(self, mesh: Mesh, **options: Any) -> Callable[..., tuple[Tensor, ...]]:
        return shard_map(
            self.body, mesh=mesh, in_specs=IN_SPECS, out_specs=tuple(self.specs), **options
        )


def inputs(sizes: Sequence[int], seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    i, j = sizes
    return tuple(
        torch.randn(n * LENGTH, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (i, j, i * j, 1, 1)
    )


def _out_specs() -> list[P]:
    """Every way in which a value may leave: whole, cut or partial over each axis."""
    ways = product(("whole", "cut", "partial"), repeat=len(AXES))
    specs = []
    for way in ways:
        cut = tuple(axis for axis, how in zip(AXES, way, strict=True) if how == "cut")
        partial = {axis for axis, how in zip(AXES, way, strict=True) if how == "partial"}
        specs.append(P(cut or None, partial=partial))
    return specs


def generate(seed: int, num_steps: int, sizes: Sequence[int]) -> tuple[Program, int]:
    """A program that the checker accepts, and how many steps it refused."""
    rng = random.Random(seed)
    mesh = make_mesh(sizes, AXES, kind="abstract")
    program, refused = Program(), 0
    for _ in range(num_steps):
        step = _draw(rng, len(IN_SPECS) + len(program.steps))
        specs = _out_specs()
        for spec in rng.sample(specs, len(specs)):
            longer = Program([*program.steps, step], [*program.specs, spec])
            try:
                check_program(longer.mapped(mesh), *inputs(sizes, seed))
            except ShardTypeError:
                continue
            program = longer
            break
        else:
            refused += 1
    return program, refused


def _draw(rng: random.Random, num_values: int) -> Step:
    # Latest values first, so that programs grow deep.
    recent = [max(0, num_values - 1 - int(rng.expovariate(0.35))) for _ in range(2)]
    if rng.random() < 0.6:
        return Step(rng.choice(sorted(UNARY)), (recent[0],), rng.choice(AXES))
    return Step(rng.choice(sorted(BINARY)), tuple(recent), rng.choice(AXES))

"""Random programs under check="global", and the same with one collective changed.

Programs grow step by step. Each step is drawn at random, and kept if the checker accepts the
program with it. On one device collectives do nothing, so a program that is accepted although one of
its collectives is missing, doubled or of another dim must give the same values on ranks as well.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardMapError,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    assume_constant,
    axis_index,
    axis_size,
    broadcast,
    convert,
    make_mesh,
    ppermute,
    reduce_scatter,
    reinterpret,
    shard_map,
)
from shardmap_torch.checker.interpreter.interpreter import current_interpreter
from shardmap_torch.checker.spmd.equivalence import Relation
from shardmap_torch.checker.spmd.layout import Dim, UnrelatedError
from tests.checker.support.differentiable import differentiable
from tests.checker.support.layouts import layouts_alone

NAMES: Final = ("a", "b")
SIZE: Final = 12
MESHES: Final = ((2, 3), (3, 2), (2, 2), (4, 3))
OTHERS: Final = ((2, 2), (3, 2), (4, 3))
"""Meshes on which a mutant is tried: an axis of 2, of 3 and of 4 ranks."""

Run = Callable[..., Tensor]


def _inner(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: (x * y).tanh().sum())(x)
    return found


def _attention(x: Tensor, y: Tensor) -> Tensor:
    q, k = (z.unflatten(1, (-1, 2)).transpose(0, 1) for z in (x, y))
    found: Tensor = ((q @ k.mT).softmax(-1) @ k).transpose(0, 1).flatten(1)
    return found


def _written(x: Tensor, y: Tensor) -> Tensor:
    made = torch.zeros_like(x)
    made[:, 1:] = y[:, 1:]
    made.add_(x)
    return made


LOCAL: Final[dict[str, tuple[int, Run]]] = {
    "add": (2, lambda x, y: x + y),
    "mul": (2, lambda x, y: x * y / 4),
    "matmul": (2, lambda x, y: x @ y / 4),
    "outer product of heads": (2, _attention),
    "where": (2, lambda x, y: torch.where(y > 0, x, y)),
    "side by side": (2, lambda x, y: torch.cat([x, y], 1)[:, : x.shape[1]]),
    "stacked": (2, lambda x, y: torch.stack([x, y]).sum(0)),
    "tanh": (1, torch.tanh),
    "transpose": (1, lambda x: x.T),
    "softmax": (1, lambda x: x.softmax(-1)),
    "softmax of columns": (1, lambda x: x.softmax(0)),
    "norm": (1, lambda x: functional.layer_norm(x, x.shape[-1:])),
    "sum": (1, lambda x: x.sum(0, keepdim=True) / 4 + 0 * x),
    "total": (1, lambda x: x.sum() / 8),
    "of a row": (1, lambda x: x.sum(1, keepdim=True).expand(-1, x.shape[1]) / 4),
    "centre": (1, lambda x: x - x.mean(-1, keepdim=True)),
    "own mean": (1, lambda x: x.sum(-1, keepdim=True) / x.shape[-1] + 0 * x),
    "heads": (1, lambda x: x.unflatten(-1, (-1, 2)).softmax(-1).flatten(1)),
    "regrouped": (1, lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2).flatten(1)),
    "rows": (1, lambda x: x.unflatten(0, (3, -1)).cumsum(1).flatten(0, 1) / 4),
    "read as other rows": (1, lambda x: x.reshape(-1, 6).cumsum(1).reshape(x.shape) / 4),
    "column": (1, lambda x: x.reshape(-1, 1)),
    "swap": (1, lambda x: torch.cat([x[:, 6:], x[:, :6]], 1)),
    "positions": (1, lambda x: x + torch.arange(x.shape[1]) / 10),
    "first row": (1, lambda x: x[:1] + 0 * x),
    "turned": (1, lambda x: x.roll(1, 0)),
    "lower": (1, torch.tril),
    "in place": (1, lambda x: x.clone().mul_(0.5).add_(x)),
    "relu": (1, torch.relu),
    "largest": (1, lambda x: x - x.amax(-1, keepdim=True).detach()),
    "detached maximum": (1, lambda x: x.detach().amax(-1, keepdim=True)),
    "row mean": (1, lambda x: x.mean(-1, keepdim=True)),
    "inner gradient": (2, _inner),
    "written": (2, _written),
    "same": (1, lambda x: x * 1),
}

COLLECTIVES: Final[dict[str, Run]] = {
    "all_reduce": lambda x, axes, dim, dst: all_reduce(x, axes, dst=dst),
    "mean": lambda x, axes, dim, dst: all_reduce(x, axes, dst=dst, op="mean"),
    "max": lambda x, axes, dim, dst: all_reduce(x, axes, dst=dst, op="max"),
    "all_gather": lambda x, axes, dim, dst: all_gather(x, axes, dim=dim, dst=dst),
    "reduce_scatter": lambda x, axes, dim, dst: reduce_scatter(x, axes, dim=dim),
    "all_to_all": lambda x, axes, dim, dst: all_to_all(x, axes, split_dim=dim, concat_dim=1 - dim),
    "slice": lambda x, axes, dim, dst: convert(x, axes, src=dst, dst=V, dim=dim),
    "replicate": lambda x, axes, dim, dst: convert(x, axes, src=I, dst=R),
    "unreplicate": lambda x, axes, dim, dst: convert(x, axes, src=R, dst=I),
    "part": lambda x, axes, dim, dst: convert(x, axes, src=dst, dst=Partial),
    "pad": lambda x, axes, dim, dst: convert(x, axes, src=V, dst=Partial, dim=dim),
    "taken as parts": lambda x, axes, dim, dst: reinterpret(x, axes, src=V, dst=Partial),
}

# They do nothing on one rank, and are refused on more.
FOREIGN: Final[dict[str, Run]] = {
    "mean_scatter": lambda x, axes, dim, dst: reduce_scatter(x, axes, dim=dim, op="mean"),
    "first": lambda x, axes, dim, dst: broadcast(x, axes, 0, dst=dst),
    "ring": lambda x, axes, dim, dst: ppermute(x, axes, _ring(axes)),
    "taken as own": lambda x, axes, dim, dst: reinterpret(x, axes, src=R, dst=V),
    "index": lambda x, axes, dim, dst: x + axis_index(axes),
    "taken as more": lambda x, axes, dim, dst: reinterpret(x, axes, src=R, dst=Partial),
}

CALLS: Final = {**COLLECTIVES, **FOREIGN}


def _ring(axes: str | tuple[str, ...]) -> list[tuple[int, int]]:
    count = axis_size(axes)
    return [(rank, (rank + 1) % count) for rank in range(count)]


@dataclass(frozen=True)
class Step:
    """One operation on values made before.

    Attributes:
        name: of a row of `LOCAL` or of `CALLS`.
        operands: which values.
        options: of a collective: axes, dim, I or R.
        times: how often the collective is called, 1 but in a mutant.
    """

    name: str
    operands: tuple[int, ...]
    options: tuple[Any, ...] = ()
    times: int = 1

    def run(self, values: Sequence[Tensor], erased: bool) -> Tensor:
        operands = [values[i] for i in self.operands]
        if self.name in LOCAL:
            return LOCAL[self.name][1](*operands)
        (value,) = operands
        if erased or not self.times:
            return value * 1  # a value of its own
        for _ in range(self.times):
            value = CALLS[self.name](value, *self.options)
        return value


def drawn(rng: random.Random, count: int) -> Step:
    """Any step, right or wrong; the last values are the likeliest operands."""
    (table,) = rng.choices([[*LOCAL], [*COLLECTIVES], [*FOREIGN]], [3, 6, 1])
    name = rng.choice(table)
    arity = LOCAL[name][0] if name in LOCAL else 1
    operands = tuple(max(rng.randrange(count), rng.randrange(count)) for _ in range(arity))
    axes = rng.choice(["a", "b", ("a", "b"), ("b", "a")])
    return Step(
        name, operands, () if name in LOCAL else (axes, rng.randrange(2), rng.choice([I, R]))
    )


# ------------------------------------------------------------------------------ how values leave


@dataclass(frozen=True)
class Exit:
    """Form in which a value leaves: the digits of its dims, each of which a spec can shard.

    `P` shards the leading digit of a dim only. A dim of heads merged with what they are split
    from has the split further back, and leaves as several dims.
    """

    digits: tuple[Dim, ...]
    partial: frozenset[str]

    def spec(self) -> P:
        entries = [axis for dim in self.digits for axis, _ in dim]
        return P(*entries, partial=self.partial)

    def taken_apart(self, x: Tensor) -> Tensor:
        digits = [digit for dim in self.digits for digit in dim]
        return x.reshape([base // axis_size(axis) if axis else base for axis, base in digits])


Exits = Sequence[Exit | None]


def _specs(exits: Exits) -> tuple[P, ...]:
    return tuple(each.spec() for each in exits if each is not None)


def exit_of(relation: Relation, x: Tensor) -> Exit | None:
    """Returns how global strictness says that a value is sharded.

    None where it is half of a maximum or a mean, of which the ranks have theirs: it may be read by
    the collective that is the other half, and cannot leave. A multiple of what is on one device
    cannot leave either.
    """
    notes = relation._notes
    x = relation._interpreter.fakify(x)
    known, sums = notes._known.get(x), notes.sums(x)
    if sums.scale != 1 or (sums.loose and sums.loose == sums.over("max", "min")):
        return None
    if known is None or sums.loose:
        raise UnrelatedError("it means nothing on one device")
    shard = next(iter(known.values()))
    return Exit(shard.dims, sums.partial)


# -------------------------------------------------------------------------------------- programs


@dataclass(frozen=True)
class Program:
    """Steps on inputs that are sharded by specs."""

    sizes: tuple[int, int]
    specs: tuple[P, ...]
    steps: tuple[Step, ...] = ()

    def mesh(self, kind: Any) -> Mesh:
        simulate: Any = "ranks" if kind == "simulated" else "auto"
        return make_mesh(self.sizes, NAMES, kind=kind, simulate=simulate)

    def values(self, inputs: Sequence[Tensor], erased: bool = False) -> list[Tensor]:
        """Returns the inputs and the values of all steps; `erased` leaves the collectives out."""
        values = list(inputs)
        for step in self.steps:
            values.append(step.run(values, erased))
        return values

    def exits(self, inputs: Sequence[Tensor]) -> Exits | None:
        """Returns how the values leave, or None if the checker refuses the program."""
        # No step reads it: a body that changes what it refers to would be checked again.
        told: list[Exit | None] = assume_constant([])
        assume_constant(self)

        def probe(*leaves: Tensor) -> tuple[()]:
            values = self.values(leaves)
            interpreter = current_interpreter()
            if interpreter is not None and isinstance(interpreter.observer, Relation):
                told[:] = [exit_of(interpreter.observer, y) for y in values]
            return ()

        leaves = [x.clone().requires_grad_() for x in inputs]
        mesh = self.mesh("abstract")
        try:
            with differentiable(), layouts_alone():
                self._mapped(probe, mesh, P())(*inputs)
                self._mapped(self._body(told), mesh, _specs(told))(*leaves)
        except (ShardMapError, UnrelatedError, RuntimeError, IndexError, ValueError):
            return None
        return told

    def _mapped(self, body: Callable[..., Any], mesh: Mesh, outs: Any) -> Callable[..., Any]:
        return shard_map(body, mesh=mesh, in_specs=self.specs, out_specs=outs, check="global")

    def _body(self, exits: Exits) -> Callable[..., tuple[Tensor, ...]]:
        def body(*inputs: Tensor) -> tuple[Tensor, ...]:
            pairs = zip(exits, self.values(inputs), strict=True)
            return tuple(each.taken_apart(y) for each, y in pairs if each is not None)

        return body

    def on_ranks(self, inputs: Sequence[Tensor], exits: Exits) -> list[Tensor]:
        """All values that leave, and the gradients of their weighted sum, of rank threads."""
        body = self._mapped(self._body(exits), self.mesh("simulated"), _specs(exits))
        return _with_gradients(body, inputs)

    def on_one_device(self, inputs: Sequence[Tensor], exits: Exits) -> list[Tensor]:
        """Runs the program without its collectives, in plain PyTorch."""

        def erased(*leaves: Tensor) -> list[Tensor]:
            pairs = zip(exits, self.values(leaves, erased=True), strict=True)
            return [y for each, y in pairs if each is not None]

        return _with_gradients(erased, inputs)


def _with_gradients(f: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor]) -> list[Tensor]:
    """Values in a row, so that it does not matter as which dims they leave."""
    leaves = [x.clone().requires_grad_() for x in inputs]
    values = [y.flatten() for y in f(*leaves)]
    weights = [torch.linspace(0, 1, y.numel()).to(y) for y in values]
    pairs = [(y, w) for y, w in zip(values, weights, strict=True) if y.requires_grad]
    smooth, cotangents = zip(*pairs, strict=True)
    gradients = torch.autograd.grad(smooth, leaves, cotangents)
    return [y.detach() for y in values] + list(gradients)


def drawn_inputs(seed: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(SIZE, SIZE, generator=generator, dtype=torch.float64) for _ in range(2)]


def grown(seed: int, inputs: Sequence[Tensor], num_steps: int = 10) -> tuple[Program, int]:
    """An accepted program on one of the meshes, and how many steps were refused on the way."""
    rng = random.Random(seed)
    entries: list[Any] = [None, "a", "b", ("a", "b"), ("b", "a")]
    specs = [
        P(*rng.choice([(rng.choice(entries), None), (None, rng.choice(entries)), ("a", "b")]))
        for _ in inputs
    ]
    program, refused = Program(rng.choice(MESHES), tuple(specs)), 0
    for _ in range(80):
        if len(program.steps) == num_steps:
            break
        step = drawn(rng, len(inputs) + len(program.steps))
        longer = replace(program, steps=(*program.steps, step))
        if longer.exits(inputs) is None:
            refused += 1
        else:
            program = longer
    return program, refused


# --------------------------------------------------------------------------------------- mutants


def mutants(program: Program, rng: random.Random) -> Iterator[tuple[str, Program]]:
    """Yields the program with one collective missing, doubled, or given other arguments."""
    for at, step in enumerate(program.steps):
        if step.name in CALLS:
            for what, new in _changed(step, rng):
                steps = (*program.steps[:at], new, *program.steps[at + 1 :])
                yield what, replace(program, steps=steps)


def _changed(step: Step, rng: random.Random) -> Iterator[tuple[str, Step]]:
    axes, dim, dst = step.options
    yield "removed", replace(step, times=0)
    yield "doubled", replace(step, times=2)
    if step.name in ASKED:
        what = "wrong src" if step.name in ("slice", "part") else "wrong dst"
        yield what, replace(step, options=(axes, dim, R if dst == I else I))
    if step.name in CUTTING:
        yield "wrong dim", replace(step, options=(axes, 1 - dim, dst))
    other: Any = axes[::-1] if isinstance(axes, tuple) else "b" if axes == "a" else "a"
    yield "wrong axis", replace(step, options=(other, dim, dst))
    names = [name for name in CALLS if name != step.name]
    yield "another collective", replace(step, name=rng.choice(names))


ASKED: Final = ("all_reduce", "mean", "max", "all_gather", "slice", "part")
CUTTING: Final = ("all_gather", "reduce_scatter", "all_to_all", "slice", "pad")

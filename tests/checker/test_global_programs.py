"""Random programs under check="global": what is accepted gives on ranks what one device gives.

Programs grow step by step. Each step is drawn at random, and kept if the checker accepts the
program with it. On one device collectives do nothing, so a program that is accepted although one of
its collectives is missing, doubled or of another dim must give the same values on ranks as well.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

import pytest
import torch
from torch import Tensor

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
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.checker.modes import current_interpreter

NAMES: Final = ("a", "b")
SIZE: Final = 12
Run = Callable[..., Tensor]


def _inner(x: Tensor, y: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(lambda x: (x * y).tanh().sum())(x)
    return found


LOCAL: Final[dict[str, tuple[int, Run]]] = {
    "add": (2, lambda x, y: x + y),
    "mul": (2, lambda x, y: x * y / 4),
    "matmul": (2, lambda x, y: x @ y / 4),
    "tanh": (1, torch.tanh),
    "transpose": (1, lambda x: x.T),
    "softmax": (1, lambda x: x.softmax(-1)),
    "sum": (1, lambda x: x.sum(0, keepdim=True) / 4 + 0 * x),
    "centre": (1, lambda x: x - x.mean(-1, keepdim=True)),
    "heads": (1, lambda x: x.unflatten(-1, (-1, 2)).softmax(-1).flatten(1)),
    "rows": (1, lambda x: x.unflatten(0, (3, -1)).cumsum(1).flatten(0, 1) / 4),
    "swap": (1, lambda x: torch.cat([x[:, 6:], x[:, :6]], 1)),
    "positions": (1, lambda x: x + torch.arange(x.shape[1]) / 10),
    "in place": (1, lambda x: x.clone().mul_(0.5).add_(x)),
    "relu": (1, torch.relu),
    "inner gradient": (2, _inner),
    "same": (1, lambda x: x * 1),
}


@dataclass(frozen=True)
class Step:
    """One operation on values made before.

    Attributes:
        name: of a row of `LOCAL`, or of a collective.
        operands: which values.
        options: of a collective: axes, dim, I or R.
    """

    name: str
    operands: tuple[int, ...]
    options: tuple[Any, ...] = ()

    def run(self, values: Sequence[Tensor]) -> Tensor:
        operands = [values[i] for i in self.operands]
        if self.name in LOCAL:
            return LOCAL[self.name][1](*operands)
        return COLLECTIVES[self.name](*operands, *self.options)


COLLECTIVES: Final[dict[str, Run]] = {
    "all_reduce": lambda x, axes, dim, dst: all_reduce(x, axes, dst=dst),
    "all_gather": lambda x, axes, dim, dst: all_gather(x, axes, dim=dim, dst=dst),
    "reduce_scatter": lambda x, axes, dim, dst: reduce_scatter(x, axes, dim=dim),
    "all_to_all": lambda x, axes, dim, dst: all_to_all(x, axes, split_dim=dim, concat_dim=1 - dim),
    "slice": lambda x, axes, dim, dst: convert(x, axes, src=dst, dst=V, dim=dim),
    "replicate": lambda x, axes, dim, dst: convert(x, axes, src=I, dst=R),
    "part": lambda x, axes, dim, dst: convert(x, axes, src=dst, dst=Partial),
    "pad": lambda x, axes, dim, dst: convert(x, axes, src=V, dst=Partial, dim=dim),
}


def drawn(rng: random.Random, count: int) -> Step:
    """Any step, right or wrong; the last values are the likeliest operands."""
    name = rng.choice([*LOCAL, *COLLECTIVES, *COLLECTIVES])
    arity = LOCAL[name][0] if name in LOCAL else 1
    operands = tuple(max(rng.randrange(count), rng.randrange(count)) for _ in range(arity))
    axes = rng.choice(["a", "b", ("a", "b"), ("b", "a")])
    return Step(
        name, operands, () if name in LOCAL else (axes, rng.randrange(2), rng.choice([I, R]))
    )


def body_of(steps: Sequence[Step], told: list[Any]) -> Callable[..., tuple[Tensor, ...]]:
    def body(*inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for step in steps:
            values.append(step.run(values))
        interpreter = current_interpreter()
        if interpreter is not None and interpreter.observer.judges:
            told[:] = [interpreter.observer.spec_of(interpreter.adopt(y)) for y in values]
        return tuple(values)

    return body


@dataclass(frozen=True)
class Program:
    """Steps on inputs that are cut by specs."""

    sizes: tuple[int, int]
    specs: tuple[P, ...]
    steps: tuple[Step, ...] = ()

    def mesh(self, kind: Any, one: bool = False) -> Mesh:
        sizes = (1, 1) if one else self.sizes
        simulate: Any = "ranks" if kind == "simulated" else "auto"
        return make_mesh(sizes, NAMES, kind=kind, simulate=simulate)

    def outs(self, inputs: Sequence[Tensor]) -> list[P] | None:
        """How the values are cut, or None if the checker refuses the program."""
        told: list[P] = []
        body = body_of(self.steps, told)

        def probe(*values: Tensor) -> tuple[()]:
            body(*values)
            return ()

        mesh = self.mesh("abstract")
        leaves = [x.clone().requires_grad_() for x in inputs]
        try:
            self.mapped(probe, mesh, P())(*inputs)
            self.mapped(body, mesh, tuple(told))(*leaves)
        except (ShardMapError, RuntimeError, IndexError):
            return None
        return told

    def mapped(self, body: Callable[..., Any], mesh: Mesh, outs: Any) -> Callable[..., Any]:
        return shard_map(body, mesh=mesh, in_specs=self.specs, out_specs=outs, check="global")

    def run(self, inputs: Sequence[Tensor], outs: Sequence[P], one: bool) -> list[Tensor]:
        """All values, and the gradients of their weighted sum."""
        leaves = [x.clone().requires_grad_() for x in inputs]
        mesh = self.mesh("simulated", one)
        values = self.mapped(body_of(self.steps, []), mesh, tuple(outs))(*leaves)
        weights = [torch.linspace(0, 1, y.numel()).reshape(y.shape).to(y) for y in values]
        total = sum((y * w).sum() for y, w in zip(values, weights, strict=True))
        gradients = torch.autograd.grad(total, leaves)
        return [y.detach() for y in values] + list(gradients)


def grown(seed: int, inputs: Sequence[Tensor]) -> tuple[Program, list[P], int]:
    """An accepted program, how its values are cut, and how many steps were refused on the way."""
    rng = random.Random(seed)
    entries: list[Any] = [None, "a", "b", ("a", "b"), ("b", "a")]
    specs = [
        P(*rng.choice([(rng.choice(entries), None), (None, rng.choice(entries)), ("a", "b")]))
        for _ in inputs
    ]
    program = Program(rng.choice([(2, 3), (3, 2), (2, 2)]), tuple(specs))
    outs, refused = program.outs(inputs) or [], 0
    for _ in range(60):
        if len(program.steps) == 9:
            break
        step = drawn(rng, len(inputs) + len(program.steps))
        longer = replace(program, steps=(*program.steps, step))
        found = longer.outs(inputs)
        if found is None:
            refused += 1
        else:
            program, outs = longer, found
    return program, outs, refused


def mutants(program: Program, rng: random.Random) -> list[Program]:
    """The same with one collective missing, doubled, of another dim, axis or kind of result."""
    found: list[Program] = []
    for at, step in enumerate(program.steps):
        if step.name not in COLLECTIVES:
            continue
        axes, dim, dst = step.options
        steps = program.steps
        for new in (
            Step("same", step.operands),
            replace(step, options=(axes, 1 - dim, dst)),
            replace(step, options=("b" if axes == "a" else "a", dim, dst)),
            replace(step, options=(axes, dim, R if dst == I else I)),
            replace(step, name=rng.choice(list(COLLECTIVES))),
        ):
            found.append(replace(program, steps=(*steps[:at], new, *steps[at + 1 :])))
        doubled = replace(step, operands=(len(program.specs) + at,))
        found.append(replace(program, steps=(*steps[: at + 1], doubled)))
    return found


def checked(program: Program, inputs: Sequence[Tensor], outs: Sequence[P]) -> None:
    """Holds an accepted program against one device."""
    ranks, one = (program.run(inputs, outs, one) for one in (False, True))
    torch.testing.assert_close(ranks, one, rtol=1e-8, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(10))
def test_accepted_programs_are_those_of_one_device(seed: int) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        generator = torch.Generator().manual_seed(seed)
        inputs = [torch.randn(SIZE, SIZE, generator=generator) for _ in range(2)]
        program, outs, refused = grown(seed, inputs)
        assert len(program.steps) >= 4
        assert refused > 0
        checked(program, inputs, outs)
        for mutant in mutants(program, random.Random(seed)):
            found = mutant.outs(inputs)
            if found is not None:
                checked(mutant, inputs, found)
    finally:
        torch.set_default_dtype(torch.float32)

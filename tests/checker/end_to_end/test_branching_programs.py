"""Random programs with branches on numbers compute, on real ranks, what their types promise.

As in `test_random_programs`: the batched strategy gives what types promise, ranks as threads what
real ranks compute. Each program runs on several inputs, so that both ways of a branch are taken.
"""

import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    assume_constant,
    axis_index,
    check_program,
    convert,
    make_mesh,
    reinterpret,
    shard_map,
)
from shardmap_torch.checker.verify import repairing
from shardmap_torch.mesh import Strategy
from tests.checker.support.differentiable import differentiable

AXES: Final = ("i", "j")
SIZES: Final = (2, 2)
LENGTH: Final = 2
IN_SPECS: Final = (P("i"), P(("i", "j")), P(), P())

OPERATIONS: Final[dict[str, Callable[..., Tensor]]] = {
    "sin": lambda axis, x: x.sin(),
    "zero": lambda axis, x: torch.zeros_like(x),
    "one": lambda axis, x: torch.ones_like(x),
    "detach": lambda axis, x: x.detach(),
    "by rank": lambda axis, x: x * (1 + axis_index(axis)),
    "by number": lambda axis, x: x * x.detach().sum().item(),
    "sum to I": lambda axis, x: all_reduce(x, axis, dst=I),
    "sum to R": lambda axis, x: all_reduce(x, axis, dst=R),
    "gather to R": lambda axis, x: all_gather(x, axis, dst=R)[:LENGTH],
    "I to R": lambda axis, x: convert(x, axis, src=I, dst=R),
    "R to I": lambda axis, x: convert(x, axis, src=R, dst=I),
    "V as P": lambda axis, x: reinterpret(x, axis, src=V, dst=Partial),
    "add": lambda axis, x, y: x + y,
    "mul": lambda axis, x, y: x * y,
    "inner": lambda axis, x, y: torch.func.grad(lambda w: (w * w * y).sum())(x),
}
BINARY: Final = ("add", "mul", "inner")


@dataclass(frozen=True)
class Step:
    """One operation on earlier values."""

    name: str
    operands: tuple[int, ...]
    axis: str

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        return OPERATIONS[self.name](self.axis, *[values[i] for i in self.operands])


@dataclass(frozen=True)
class Choice:
    """One step or another, as an earlier value says; `taken` notes which."""

    condition: int
    bound: float
    steps: tuple[Step, Step]
    taken: Counter[bool] = field(default_factory=Counter, compare=False, hash=False)

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        if values[self.condition].detach().sum().item() > self.bound:
            self.taken[True] += 1
            return self.steps[0](values)
        self.taken[False] += 1
        return self.steps[1](values)


@dataclass
class Program:
    steps: list[Step | Choice] = field(default_factory=list)
    specs: list[P] = field(default_factory=list)

    def body(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        values = list(inputs)
        for step in self.steps:
            values.append(step(values))
        return tuple(values[len(inputs) :])

    def mapped(self, mesh: Any) -> Callable[..., tuple[Tensor, ...]]:
        # Nothing reads what choices note: a body that changes what it reads is checked again.
        assume_constant(self)
        return shard_map(self.body, mesh=mesh, in_specs=IN_SPECS, out_specs=tuple(self.specs))


@pytest.fixture(autouse=True)
def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody reads the repairs of what is refused."""
    monkeypatch.setattr(repairing, "_TRIES", 0)


def inputs(seed: int) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    i, j = SIZES
    return tuple(
        torch.randn(n * LENGTH, dtype=torch.float64, generator=generator).requires_grad_()
        for n in (i, i * j, 1, 1)
    )


def generate(seed: int, num_steps: int) -> Program:
    """A program that the checker accepts, half of its steps choices."""
    rng = random.Random(seed)
    mesh = make_mesh(SIZES, AXES, kind="abstract")
    entries = product((None, "i", "j", ("i", "j")), ({*()}, {"i"}, {"j"}, {"i", "j"}))
    specs = [
        P(entry, partial=partial) for entry, partial in entries if not partial & {*(entry or ())}
    ]
    program = Program()
    for number in range(num_steps):
        for _ in range(10):
            step = draw(rng, len(IN_SPECS) + len(program.steps), choice=number % 2 == 1)
            found = next((spec for spec in specs if fits(program, step, spec, mesh)), None)
            if found is not None:
                program = Program([*program.steps, step], [*program.specs, found])
                break
    return program


def fits(program: Program, step: Step | Choice, spec: P, mesh: Any) -> bool:
    longer = Program([*program.steps, step], [*program.specs, spec])
    try:
        with differentiable():
            check_program(longer.mapped(mesh), *inputs(0))
    except ShardTypeError:
        return False
    return True


def draw(rng: random.Random, num_values: int, choice: bool) -> Step | Choice:
    steps = []
    for _ in range(2):
        name = rng.choice(sorted(OPERATIONS))
        count = 2 if name in BINARY else 1
        operands = tuple(rng.randrange(num_values) for _ in range(count))
        steps.append(Step(name, operands, rng.choice(AXES)))
    first, second = steps
    if not choice:
        return first
    return Choice(rng.randrange(2, num_values), rng.choice((-0.5, 0.0, 0.5)), (first, second))


def run(program: Program, strategy: Strategy, seed: int) -> Any:
    mesh = make_mesh(SIZES, AXES, kind="simulated", simulate=strategy)
    xs = inputs(seed)
    ys = program.mapped(mesh)(*xs)
    loss = sum(0 * x.sum() for x in xs)
    for number, y in enumerate(ys):
        weights = torch.cos(torch.arange(y.numel(), dtype=y.dtype) + number).reshape(y.shape)
        loss = loss + (weights * y).sum()
    assert isinstance(loss, Tensor)
    return [y.detach() for y in ys], torch.autograd.grad(loss, xs)


def check(seed: int, num_steps: int) -> tuple[int, int]:
    """Returns how many choices the program has, and how many of them were made both ways."""
    program = generate(seed, num_steps)
    choices = [step for step in program.steps if isinstance(step, Choice)]
    for choice in choices:
        choice.taken.clear()
    for data in range(4):
        try:
            promised = run(program, "vmap", data)
        except RuntimeError as error:
            if "calling .item() on a Tensor" not in str(error):
                raise
            continue  # a value like `ones_like(x)` is equal on all ranks, and batched as `x` is
        actual = run(program, "ranks", data)
        torch.testing.assert_close(actual, promised, msg=lambda text: f"{program}\n{text}")
    return len(choices), sum(len(choice.taken) == 2 for choice in choices)


def test_accepted_branches_are_right_on_ranks() -> None:
    found = [check(seed, 4) for seed in range(2)]
    assert sum(num for num, _ in found) >= 2
    assert sum(both for _, both in found) >= 1


@pytest.mark.fuzz
@pytest.mark.parametrize("seed", range(100, 112))
def test_many_accepted_branches_are_right_on_ranks(seed: int) -> None:
    check(seed, 6)

"""Random programs: type-directed, each step one that the checker accepts."""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final
from unittest.mock import patch

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    assume_constant,
    check_program,
    make_mesh,
    shard_map,
)
from shardmap_torch.checker.interpreter.interpreter import current_interpreter
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.verify import repairing
from shardmap_torch.types import AxisType, K, Z
from tests.checker.support.communicate import CONVERSIONS, Communication
from tests.checker.support.differentiable import differentiable
from tests.checker.support.machines import (
    DETACHING,
    HOW,
    LENGTH,
    AllRanks,
    Machine,
    Notes,
    OnMesh,
    types_as_read,
    types_of,
)
from tests.checker.support.steps import (
    BINARY,
    CURVED,
    CUTTING,
    LINEAR,
    RANKED,
    Closed,
    Communicate,
    Gradient,
    Local,
    Step,
    mutants_of,
)

SHAPES: Final = ((2,), (3,), (4,), (2, 2), (1, 3), (2, 1))
RANKS: Final = {1: ((2,), (3,), (4,)), 2: ((2, 1), (1, 3), (2, 2))}
"""Meshes of 2, 3 and 4 ranks by how many axes they have."""
NAMES: Final = ("i", "j")


@dataclass(frozen=True)
class Program:
    """A program: how values enter, its steps, and how each step's value leaves."""

    in_specs: tuple[P, ...]
    smooth: tuple[bool, ...]
    steps: tuple[Step, ...] = ()
    out_specs: tuple[P, ...] = ()
    axes: tuple[str, ...] = NAMES

    def run(self, machine: Machine, inputs: Sequence[Any]) -> list[Any]:
        """Every step's value."""
        values = list(inputs)
        for step in self.steps:
            values.append(step.run(machine, values))
        return values[len(inputs) :]

    def mapped(self, mesh: Mesh, notes: Notes, closures: Sequence[Tensor]) -> Any:
        """The program as a function of global values."""
        closures = tuple(closures)
        # No step reads the notes: a body that changes what it refers to would be checked again.
        for unread in (self, notes):
            assume_constant(unread)

        def body(*inputs: Tensor) -> tuple[Tensor, ...]:
            machine = OnMesh(closures, notes)
            interpreted = current_interpreter() is not None
            if interpreted:
                notes.clear()
            outs = self.run(machine, inputs)
            if interpreted:
                notes.inputs[:], notes.values[:] = map(types_of, inputs), map(types_of, outs)
                notes.read[:] = map(types_as_read, [*inputs, *outs])
            return tuple(outs[: len(self.out_specs)])

        return shard_map(body, mesh=mesh, in_specs=self.in_specs, out_specs=self.out_specs)

    def inputs(self, mesh: Mesh, seed: int = 0) -> list[Tensor]:
        """Global values; those that are not smooth ask for no gradient."""
        generator = torch.Generator().manual_seed(seed)
        made = []
        for spec, smooth in zip(self.in_specs, self.smooth, strict=True):
            shape = [LENGTH, LENGTH]
            for dim, axes in spec.sharded_dims:
                shape[dim] *= mesh.num_ranks(axes)
            drawn = torch.randn(shape, dtype=torch.float64, generator=generator)
            made.append(drawn.requires_grad_(smooth))
        return made

    def closures(self) -> list[Tensor]:
        """Returns the tensors that its body closes over."""
        generator = torch.Generator().manual_seed(99)
        drawn = torch.randn(LENGTH, LENGTH, dtype=torch.float64, generator=generator)
        return [drawn.requires_grad_()]

    def mutants(self) -> Iterator[tuple[str, "Program"]]:
        """Every program with one collective changed."""
        for number, step in enumerate(self.steps):
            for what, other in mutants_of(step, self.axes):
                yield (
                    what,
                    replace(self, steps=(*self.steps[:number], other, *self.steps[number + 1 :])),
                )


def abstract(shape: Sequence[int]) -> Mesh:
    return make_mesh(shape, NAMES[: len(shape)], kind="abstract")


def judged(program: Program, shape: Sequence[int]) -> tuple[Notes | None, str]:
    """Returns what the checker notes of a program, or why it is refused. No repairs are tried."""
    mesh, notes = abstract(shape), Notes()
    try:
        with patch.object(repairing, "_TRIES", 0), differentiable():
            check_program(program.mapped(mesh, notes, program.closures()), *program.inputs(mesh))
    except ShardTypeError as error:
        return None, str(error)
    return notes, ""


# ------------------------------------------------------------------------------ truth, and runs


@dataclass
class Outcome:
    """Global results, and gradients of a random combination of them.

    Attributes:
        values: one a step.
        gradients: of the smooth inputs and of the closures.
    """

    values: list[Tensor]
    gradients: list[Tensor]
    broken: list[str] = field(default_factory=list)


def weights_of(values: Sequence[Tensor]) -> list[Tensor]:
    """Cotangents in which no two elements are alike."""
    return [
        torch.cos(torch.arange(y.numel(), dtype=torch.float64) * 0.7 + number).reshape(y.shape)
        for number, y in enumerate(values)
    ]


def differentiated(values: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    smooth = [(y, w) for y, w in zip(values, weights_of(values), strict=True) if y.requires_grad]
    if not smooth or not leaves:
        return [torch.zeros_like(x) for x in leaves]
    ys, weights = zip(*smooth, strict=True)
    found = torch.autograd.grad(ys, leaves, weights, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def simulated(program: Program, shape: Sequence[int], strategy: Any) -> Outcome:
    """Computes the program on the mesh."""
    mesh = make_mesh(shape, program.axes, kind="simulated", simulate=strategy)
    xs, closures = program.inputs(mesh), program.closures()
    with patch.object(repairing, "_TRIES", 0), differentiable():
        ys = program.mapped(mesh, Notes(), closures)(*xs)
    leaves = [*(x for x in xs if x.requires_grad), *closures]
    gradients = differentiated(ys, leaves)
    return Outcome([y.detach() for y in ys], gradients)


def truth(program: Program, shape: Sequence[int], notes: Notes) -> Outcome:
    """Computes what the ranks' values and the types noted of them mean."""
    mesh = abstract(shape)
    xs, closures = program.inputs(mesh), program.closures()
    ys, broken = on_one_device(program, mesh, notes, xs, closures)
    leaves = [*(x for x in xs if x.requires_grad), *closures]
    gradients = differentiated(ys, leaves)
    return Outcome([y.detach() for y in ys], gradients, broken)


def on_one_device(
    program: Program, mesh: Mesh, notes: Notes, xs: Sequence[Tensor], closures: Sequence[Tensor]
) -> tuple[list[Tensor], list[str]]:
    """The global results in one autograd graph, and values that are not as they are typed."""
    machine = AllRanks(mesh, closures, notes)
    columns = [_enter(machine, x, spec) for x, spec in zip(xs, program.in_specs, strict=True)]
    outs = program.run(machine, columns)
    broken = [
        f"value {number} is typed {axis_type} over {axis!r}"
        for number, (column, types) in enumerate(zip(outs, notes.values, strict=True))
        for axis, axis_type in zip(program.axes, types, strict=True)
        if not _is_as_typed(machine, column, axis, axis_type)
    ]
    ys = [
        leave(machine, column, spec, types)
        for column, spec, types in zip(outs, program.out_specs, notes.values, strict=True)
    ]
    return ys, broken


def _enter(machine: AllRanks, x: Tensor, spec: P) -> list[Tensor]:
    """Every rank's part of a global value."""
    column = []
    sizes = dict(zip(machine.mesh.axis_names, machine.mesh.axis_sizes, strict=True))
    for place in machine.places:
        at = dict(zip(machine.mesh.axis_names, place, strict=True))
        part = x
        for dim, axes in spec.sharded_dims:
            for axis in axes:
                part = part.chunk(sizes[axis], dim)[at[axis]]
        if any(at[axis] for axis in spec.partial):
            part = torch.zeros_like(part)
        column.append(part)
    return column


def leave(machine: AllRanks, column: Sequence[Tensor], spec: P, types: Types) -> Tensor:
    """The global value of all ranks' results; what is equal on them is one value, not a sum."""
    names = machine.mesh.axis_names
    found = dict(zip(machine.places, column, strict=True))

    def reduced(axis: str, how: Callable[[list[Tensor]], Tensor]) -> None:
        nonlocal found
        at = names.index(axis)
        groups: dict[tuple[int, ...], list[Tensor]] = {}
        for place, value in found.items():
            groups.setdefault((*place[:at], 0, *place[at + 1 :]), []).append(value)
        found = {place: how(values) for place, values in groups.items()}

    for dim, axes in spec.sharded_dims:
        for axis in reversed(axes):
            reduced(axis, lambda parts, dim=dim: torch.cat(parts, dim))  # type: ignore[misc]
    for axis, axis_type in zip(names, types, strict=True):
        if axis in spec.partial and axis_type in (V, Partial):
            reduced(axis, lambda parts: torch.stack(parts).sum(0))
        else:
            reduced(axis, lambda parts: parts[0])
    (value,) = found.values()
    return value


def _is_as_typed(
    machine: AllRanks, column: Sequence[Tensor], axis: str, axis_type: AxisType
) -> bool:
    if axis_type == Z and any(bool((x != 0).any()) for x in column):
        return False
    if axis_type not in (I, R, K, Z):
        return True
    return all(
        close(column[rank], column[group[0]]) for group in machine.groups([axis]) for rank in group
    )


def close(first: Tensor, second: Tensor) -> bool:
    """Equal up to what a few dozen float64 operations on such numbers cost."""
    scale = float(second.detach().abs().max()) if second.numel() else 0.0
    return torch.allclose(first, second, rtol=1e-8, atol=1e-8 * max(1.0, scale))


def same(first: Outcome, second: Outcome) -> bool:
    """Equal values and gradients."""
    pairs = zip([*first.values, *first.gradients], [*second.values, *second.gradients], strict=True)
    return all(x.shape == y.shape and close(x, y) for x, y in pairs)


def is_tame(outcome: Outcome) -> bool:
    """Returns whether its numbers are such that a comparison says something."""
    return all(
        bool(torch.isfinite(x).all()) and float(x.abs().max()) < 1e6
        for x in [*outcome.values, *outcome.gradients]
    )


# ----------------------------------------------------------------------------------- generation


def _without_data(step: Step) -> Step:
    if isinstance(step, Local):
        return replace(step, name=step.name.replace("data", "detached"))
    return step


def leaving(types: Types) -> list[list[str]]:
    """For each axis, how a value of that type may leave."""
    program_paths = {V: ["0", "1", "partial"], Partial: ["partial"]}
    return [
        program_paths.get(axis_type, [*["whole"] * 7, "0", "1", "partial"]) for axis_type in types
    ]


def spec_of(axes: Sequence[str], program_paths: Sequence[str]) -> P:
    """A spec from one word an axis."""
    entries = [
        tuple(a for a, way in zip(axes, program_paths, strict=True) if way == dim) for dim in "01"
    ]
    words = ("partial", "replicate", "invariant")
    named = {
        word: {a for a, w in zip(axes, program_paths, strict=True) if w == word} for word in words
    }
    return P(*(entry or None for entry in entries), **named)


class Draw:
    """Draws steps for a program with so many values so far."""

    def __init__(self, rng: random.Random, axes: Sequence[str]) -> None:
        self.rng, self.axes = rng, axes

    def operand(self, num_values: int) -> int:
        # Latest values first, so that programs grow deep.
        return max(0, num_values - 1 - int(self.rng.expovariate(0.5)))

    def step(self, num_values: int, depth: int = 0) -> Step:
        dice = self.rng.random()
        if dice < 0.4:
            return self.communicate(num_values)
        if dice < 0.65 and depth < 2:
            return self.gradient(num_values, depth)
        if dice < 0.68:
            return Closed(self.operand(num_values))
        return self.local(num_values)

    def local(self, num_values: int) -> Step:
        table = self.rng.choice((LINEAR, CURVED, CUTTING, RANKED, BINARY, BINARY))
        name = self.rng.choice(sorted(table))
        count = 2 if table is BINARY else 1
        operands = tuple(self.operand(num_values) for _ in range(count))
        axis = self.rng.choice(self.axes) if table is RANKED else None
        return Local(name, operands, axis)

    def over(self) -> tuple[str, ...]:
        if len(self.axes) > 1 and self.rng.random() < 0.25:
            return tuple(self.rng.sample(self.axes, 2))
        return (self.rng.choice(self.axes),)

    def communicate(self, num_values: int) -> Step:
        call = self.call()
        again = self.rng.random() < 0.1
        return Communicate(call, self.operand(num_values), again=again)

    def call(self) -> Communication:
        choose, axes = self.rng.choice, self.over()
        dim, dst = choose((0, 1)), choose((I, R))
        tiled, uneven = choose(((True, False), (True, True), (False, False)))
        name = choose(
            "all_reduce all_reduce all_gather reduce_scatter all_to_all ppermute shift "
            "broadcast convert convert reinterpret reinterpret".split()
        )
        if name == "all_reduce":
            return Communication(name, axes, dst=dst, op=choose(("sum", "sum", "mean", "max")))
        if name in ("convert", "reinterpret"):
            _, src, to = choose([each for each in CONVERSIONS if each[0] == name])
            return Communication(name, axes, src=src, dst=to, dim=dim)
        op: Any = choose(("sum", "mean")) if name == "reduce_scatter" else "sum"
        return Communication(name, axes, None, dst, op, dim, tiled, uneven)

    def gradient(self, num_values: int, depth: int) -> Step:
        steps: list[Step] = []
        count = num_values + 1
        for _ in range(self.rng.randint(1, 3)):
            drawn = self.step(count, depth + 1)
            steps.append(self._from_last(drawn, count - 1))
            count += 1
        reduce = None
        if self.rng.random() < 0.6:
            op: Any = self.rng.choice(("sum", "mean"))
            dst = self.rng.choice((I, I, R))
            reduce = Communication("all_reduce", self.over(), dst=dst, op=op)
        how = self.rng.choice(sorted(HOW) if depth == 0 else sorted(HOW)[-2:])
        if how not in DETACHING:  # there `.data` cuts the innermost derivative alone
            steps = [_without_data(step) for step in steps]
        return Gradient(how, self.operand(num_values), tuple(steps), reduce)

    def _from_last(self, step: Step, last: int) -> Step:
        """Applies the step to the latest value, so that the loss depends on all of them."""
        if isinstance(step, Local):
            return replace(step, operands=(last, *step.operands[1:]))
        return replace(step, operand=last)


def start(rng: random.Random, shape: Sequence[int]) -> Program:
    """Inputs of all types."""
    axes = NAMES[: len(shape)]
    words = ("0", "0", "1", "open", "open", "replicate", "invariant", "partial")
    count = 4
    specs = tuple(spec_of(axes, [rng.choice(words) for _ in axes]) for _ in range(count))
    return Program(specs, tuple(rng.random() < 0.8 for _ in specs), axes=axes)


@dataclass
class Growth:
    """A program that grows, and how many steps were refused on its way."""

    program: Program
    refused: int = 0


CANDIDATES: Final = 4


def grown(rng: random.Random, shape: Sequence[int], num_steps: int) -> Growth:
    """A program that the checker accepts."""
    growth = Growth(start(rng, shape))
    draw = Draw(rng, NAMES[: len(shape)])
    for _ in range(num_steps):
        _grow(growth, draw, shape)
    return growth


def _grow(growth: Growth, draw: Draw, shape: Sequence[int]) -> None:
    program = growth.program
    for _ in range(CANDIDATES):
        step = draw.step(len(program.in_specs) + len(program.steps))
        longer = replace(program, steps=(*program.steps, step))
        # Without it among the results only the forward has to type.
        notes, _ = judged(replace(longer, out_specs=()), shape)
        if notes is None:
            growth.refused += 1
            continue
        program_paths = [draw.rng.choice(each) for each in leaving(notes.values[-1])]
        specs = (*program.out_specs, spec_of(program.axes, program_paths))
        if judged(replace(longer, out_specs=specs), shape)[0] is not None:
            growth.program = replace(longer, out_specs=specs)
            return
        growth.refused += 1


def broken(rng: random.Random, program: Program, notes: Notes) -> Program | None:
    """The program with a step, or an output, that the rules forbid for the types it has."""
    program_paths: dict[AxisType, list[Program]] = {}
    for place, types in enumerate(notes.read):
        number = place - len(program.in_specs)
        for axis, axis_type in zip(program.axes, types, strict=True):
            found = [_with_step(program, step) for step in _forbidden(axis_type, axis, place)]
            if axis_type in (V, Partial) and number >= 0:
                found.append(_with_whole(program, number, axis))
            if found:
                program_paths.setdefault(axis_type, []).extend(found)
    # A type first, since few values are P.
    return (
        rng.choice(program_paths[rng.choice(sorted(program_paths, key=str))])
        if program_paths
        else None
    )


def _forbidden(axis_type: AxisType, axis: str, place: int) -> list[Step]:
    """Steps that no value of that type may take: products of P as often as all curves."""
    if axis_type == Z:
        return []
    calls = [
        Communication("convert", (axis,), src=src, dst=R if src == I else I)
        for src in (I, R)
        if axis_type in (V, Partial) or (axis_type in (I, R) and axis_type != src)
    ]
    if axis_type != V:
        names = "all_gather all_to_all ppermute shift broadcast".split()
        calls += [Communication(name, (axis,), dst=I) for name in names]
        calls.append(Communication("all_reduce", (axis,), dst=R, op="max"))
        calls.append(Communication("reinterpret", (axis,), src=V, dst=Partial))
    if axis_type in (I, R, K):
        calls += [
            Communication("all_reduce", (axis,), dst=I),
            Communication("reduce_scatter", (axis,)),
        ]
    curved = [Local(name, (place,)) for name in CURVED] if axis_type == Partial else []
    curved += [Local("mul", (place, place))] * len(curved)
    return [*(Communicate(call, place) for call in calls), *curved]


def _with_step(program: Program, step: Step) -> Program:
    """The step's value leaves in no way, so that it is the step that is refused."""
    return replace(program, steps=(*program.steps, step), out_specs=())


def _with_whole(program: Program, number: int, axis: str) -> Program:
    """Promises one output to be equal on all ranks of `axis`."""
    specs = list(program.out_specs)
    old = specs[number]
    kept = [tuple(a for a in axes if a != axis) or None for axes in _entries(old)]
    specs[number] = P(*kept, partial=old.partial - {axis})
    return replace(program, out_specs=tuple(specs))


def _entries(spec: P) -> list[tuple[str, ...]]:
    """The axes of each dim."""
    entries = dict(spec.sharded_dims)
    return [tuple(entries.get(dim, ())) for dim in (0, 1)]


@st.composite
def programs(draw: st.DrawFn, num_steps: int = 8, shapes: Any = SHAPES) -> tuple[Program, Any]:
    """An accepted program and the mesh shape that it was grown on.

    A seed, and not each choice, is drawn: the choices keep their odds, and a program that fails
    shrinks to its first steps.
    """
    shape = draw(st.sampled_from(shapes))
    rng = random.Random(draw(st.integers(0, 2**32)))
    return grown(rng, shape, draw(st.integers(num_steps // 2, num_steps))).program, shape

"""Every repair that is printed for a rejected program, applied by a program and compared.

Rejections are recorded where calls are checked, so that any program can be tried: those of tables,
mutants of random programs, training steps. A repaired program runs on rank threads and, without
repairs, where each axis has one rank.

Run, which writes a section of docs/coverage.md:
.venv/bin/python -m tests.checker.support.repair_trials
"""

import random
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Final
from unittest import mock

import torch
from torch import Tensor

from shardmap_torch import (
    Mesh,
    P,
    ShardMapError,
    ShardTypeError,
    check_program,
    make_mesh,
    shard_map,
)
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.ir.repairs import Repair, rejection_of
from shardmap_torch.checker.verify import repairing, verdict
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.tree import unflatten
from shardmap_torch.run import checked
from tests.checker.support import (
    accumulations,
    global_programs,
    other_programs,
    page,
    programs,
    rejected,
)
from tests.checker.support.classes import backwards, hooks, training
from tests.checker.support.repaired import outcome

_TRIES: Final = repairing._TRIES
RIGHT: Final = "right"
WRONG: Final = "wrong"
REFUSED: Final = "refused"
OTHER: Final = "not applied"


@dataclass(frozen=True)
class Rejection:
    """A call that was refused."""

    call: Call
    error: ShardTypeError
    strictness: Any


def rejections_of(run: Callable[[], object]) -> list[Rejection]:
    """Returns the calls that are refused in a run, whose own error is not raised."""
    found: list[Rejection] = []
    verify = verdict.verify

    def recorded(call: Call, strictness: Any) -> Verdict:
        try:
            with mock.patch.object(repairing, "_TRIES", _TRIES):  # generators of programs try none
                found_right = verify(call, strictness)
        except ShardTypeError as error:
            found.append(Rejection(call, error, strictness))
            raise
        if found_right.refusal is not None:
            found.append(Rejection(call, found_right.refusal, strictness))
        return found_right

    with mock.patch.object(checked, "verify", recorded), suppress(ShardMapError):
        run()
    return found


def _numbers(at: int, x: Tensor) -> Tensor:
    if not x.is_floating_point():
        return x.detach().clone()
    generator = torch.Generator().manual_seed(at)
    return torch.randn(x.shape, dtype=torch.float64, generator=generator) / 2


def fate_of(rejection: Rejection, repair: Repair) -> str:
    """Applies a repair; returns whether values and gradients are those of one device.

    REFUSED if the repaired program is, OTHER if nothing here applies such a repair, or if the
    program cannot run with one rank an axis.
    """
    call = rejection.call
    leaves = [call.leaves[position] for position in call.crossing]
    positions = {position: at for at, position in enumerate(call.crossing)}
    own = replace(
        repair,
        in_specs={positions[at]: spec for at, spec in repair.in_specs.items()},
        replicate={positions[at]: a for at, a in repair.replicate.items()},
    )

    def body(*tensors: Tensor) -> Any:
        every = list(call.leaves)
        for position, value in zip(call.crossing, tensors, strict=True):
            every[position] = value
        args, kwargs = unflatten(call.structure, every)
        return call.function(*args, **kwargs)

    specs = [call.match.spec(position) for position in call.crossing]
    args = [_numbers(at, x) for at, x in enumerate(leaves)]
    grad = any(x.requires_grad for x in leaves)
    names = call.mesh.axis_names
    ranks = make_mesh(call.mesh.axis_sizes, names, kind="simulated", simulate="ranks")
    one = make_mesh((1,) * len(names), names, kind="simulated", simulate="ranks")
    fate = _compared(ranks, one, body, specs, call.out_specs, own, args, grad, rejection)
    if grad and fate in (REFUSED, OTHER) and rejection_of(rejection.error).takes_gradients:
        # The results of a step that takes gradients by itself may have none.
        fate = _compared(ranks, one, body, specs, call.out_specs, own, args, False, rejection)
    return fate


def _compared(
    ranks: Mesh,
    one: Mesh,
    body: Callable[..., Any],
    specs: Sequence[P],
    out_specs: Any,
    repair: Repair,
    args: Sequence[Tensor],
    grad: bool,
    rejection: Rejection,
) -> str:
    try:
        expected = outcome(body, one, specs, out_specs, None, args, grad)
    except Exception:  # as of a step that only several ranks can make
        return OTHER
    try:
        found = outcome(body, ranks, specs, out_specs, repair, args, grad, rejection.strictness)
    except ShardMapError:
        return REFUSED
    same = len(found) == len(expected) and all(map(_same, found, expected))
    return RIGHT if same else WRONG


def _same(x: Tensor, y: Tensor) -> bool:
    return x.shape == y.shape and torch.allclose(x, y, rtol=1e-8, atol=1e-8, equal_nan=True)


@dataclass
class Tally:
    """Counts of the rejections of one class.

    Attributes:
        rejections: how many there were; `advised` of these have a `Fix:` or a repair.
        repaired: how many have a repair that was tried.
        fates: those of these repairs.
        notes: of each repair that is not right, and of each rejection without advice, its text.
    """

    rejections: int = 0
    advised: int = 0
    repaired: int = 0
    fates: Counter[str] = field(default_factory=Counter)
    notes: list[str] = field(default_factory=list)

    def note(self, rejection: Rejection) -> None:
        """Tries the repairs of one rejection."""
        repair, text = rejection_of(rejection.error).tried, str(rejection.error)
        self.rejections += 1
        self.repaired += repair is not None
        self.advised += "Fix:" in text or repair is not None
        if repair is None:
            self.notes += [f"no advice: {text}"] * ("Fix:" not in text)
            return
        fate = fate_of(rejection, repair)
        self.fates[fate] += 1
        if fate != RIGHT:
            self.notes.append(f"{fate}: {repair.text}\n{text}")


# ----------------------------------------------------------------------------------- programs

Source = Callable[[int], Iterator[Callable[[], object]]]


def _checked(body: Any, mesh: Any, specs: Any, outs: Any, args: Sequence[Any], check: Any) -> Any:
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=outs, check=check)
    return partial(check_program, mapped, *args)


def _tables(count: int) -> Iterator[Callable[[], object]]:
    for body, spec, outs in rejected.CASES:
        args = rejected.X, rejected.W.detach().clone().requires_grad_()
        for check in ("local", "global"):
            yield _checked(body, rejected.MESH, (P("dp"), spec), outs, args, check)
    for wrong in other_programs.WRONG:
        mapped = other_programs.mapped(wrong, P("dp"))
        yield partial(check_program, mapped, *other_programs.ARGS)


def _training(count: int) -> Iterator[Callable[[], object]]:
    for seed in range(count):
        step = training.mutant(random.Random(seed))
        yield partial(step.is_accepted, "local")
        yield partial(step.is_accepted, "global")


def _local(count: int) -> Iterator[Callable[[], object]]:
    for seed in range(count):
        rng = random.Random(seed)
        shape = programs.SHAPES[seed % len(programs.SHAPES)]
        program = programs.grown(rng, shape, 5).program
        notes, _ = programs.judged(program, shape)
        every = [mutant for _, mutant in program.mutants()]
        wrong = notes and programs.broken(rng, program, notes)
        for mutant in [*rng.sample(every, min(4, len(every))), *([wrong] if wrong else [])]:
            yield partial(programs.judged, mutant, shape)


def _global(count: int) -> Iterator[Callable[[], object]]:
    for seed in range(count):
        inputs = global_programs.drawn_inputs(seed)
        program, _ = global_programs.grown(seed, inputs, 6)
        rng = random.Random(seed)
        every = [mutant for _, mutant in global_programs.mutants(program, rng)]
        for mutant in rng.sample(every, min(5, len(every))):
            yield partial(mutant.exits, inputs)


def _accumulations(count: int) -> Iterator[Callable[[], object]]:
    for seed in range(count):
        rng = random.Random(seed)
        wrong = accumulations.mutant(accumulations.drawn(rng), rng)
        yield partial(accumulations.run, wrong, (2, 2), "global")


def _drawn(draw: Callable[[random.Random], Any]) -> Source:
    def source(count: int) -> Iterator[Callable[[], object]]:
        for seed in range(count):
            yield draw(random.Random(seed)).fate

    return source


SOURCES: Final[Mapping[str, Source]] = {
    "tables": _tables,
    "training steps with a mistake": _training,
    "random programs, a collective changed or forbidden": _local,
    'the same under `check="global"`': _global,
    "loops over microbatches": _accumulations,
    "backwards of one's own": _drawn(backwards.drawn),
    "hooks": _drawn(hooks.drawn),
}
"""Generators of programs, most of them wrong."""


def tally(name: str, count: int) -> Tally:
    """Tries the repairs of all rejections of one source."""
    found = Tally()
    for run in SOURCES[name](count):
        for rejection in rejections_of(run):
            found.note(rejection)
    return found


SEEDS: Final = 60


def section(tallies: Mapping[str, Tally], seeds: int) -> str:
    """Writes the page's section on repairs."""
    rows = [
        (name, t.rejections, t.advised, t.repaired, *(f[RIGHT], f[WRONG] + f[REFUSED], f[OTHER]))
        for name, t in tallies.items()
        for f in [t.fates]
    ]
    text = (
        f"Programs of {seeds} seeds of each class were checked, most of them wrong. Each "
        "repair that an error prints as tried was applied by a program, and the result was "
        "compared with one device, values and gradients, on rank threads in float64. "
        "*advised*: rejections with a `Fix:` or such a repair. *not applied*: programs that "
        "cannot run on one rank."
    )
    head = "programs|rejections|advised|with a repair|right|wrong|not applied".split("|")
    table = page.table(head, rows)
    return page.section("Repairs that are printed", f"repair_trials {seeds}", text, table)


def main() -> int:
    """Writes the page's section; a number on the command line says how many seeds are tried."""
    seeds = page.begin(SEEDS)
    tallies: dict[str, Tally] = {}
    for name in SOURCES:
        tallies[name] = tally(name, seeds)
        print(f"{name}: {tallies[name]}", flush=True)
    page.write(section(tallies, seeds))
    return 1 if any(t.fates[WRONG] or t.fates[REFUSED] for t in tallies.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

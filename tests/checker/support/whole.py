"""op_db through everything: `shard_map`, the checker, ranks that run, and their gradients.

`tests/checker/support/fuzz.py` tries the rule tables by themselves, many times faster; here each
operator is the body of a `shard_map` whose operands enter with given types. What the ranks return,
and what gradients come out of the boundary, is compared with one autograd graph of all ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final
from unittest.mock import patch

import torch
from torch import Tensor

from shardmap_torch import (
    P,
    ShardMapError,
    assume_constant,
    check_program,
    make_mesh,
    reinterpret,
    shard_map,
)
from shardmap_torch.checker.verify import verdict
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.types import AxisType, I, K, Partial, R, V
from shardmap_torch.validate.numbers import unequal
from tests.checker.support.fuzz import NUM_RANKS, Case, Typings, Values, precision
from tests.checker.support.machines import types_of
from tests.checker.support.programs import differentiated

AXIS: Final = "r"
ABSTRACT: Final = make_mesh((NUM_RANKS,), (AXIS,), kind="abstract")
RANKS: Final = make_mesh((NUM_RANKS,), (AXIS,), kind="simulated", simulate="ranks")
ENTERS: Final[Mapping[AxisType, P]] = {
    V: P(AXIS),
    Partial: P(AXIS),  # the body takes the V for addends
    R: P(replicate={AXIS}),
    I: P(invariant={AXIS}),
    K: P(),
}


@dataclass
class Finding:
    """Result of one trial: refused, skipped, wrong, or none of these."""

    refused: str | None = None
    skipped: str | None = None
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Trial:
    """One sample with a type for each floating operand; `sharded` says how an R result leaves."""

    case: Case
    types: Typings
    sharded: bool = False
    seed: int = 0

    def leaves(self) -> list[Tensor]:
        """The operands as global values: the ranks' own ones stacked."""
        values = Values(self.case, self.types, torch.Generator().manual_seed(self.seed))
        made = []
        for place, axis_type in self.types.operands.items():
            column = values.operand(place)
            whole = torch.stack(column) if axis_type in (V, Partial) else column[0].clone()
            made.append(whole.requires_grad_(place in self.case.smooth and axis_type != K))
        return made

    def body(self, note: Callable[[list[Tensor]], None]) -> Callable[..., tuple[Tensor, ...]]:
        """The operator on one rank's operands; its results are noted on their way."""
        operands = self.types.operands

        def run(*locals_: Tensor) -> tuple[Tensor, ...]:
            values = {}
            for (place, axis_type), x in zip(operands.items(), locals_, strict=True):
                own = x[0] if axis_type in (V, Partial) else x
                if place not in self.case.smooth:
                    own = own.clone()  # running statistics, say, which the operator writes
                if axis_type == Partial:
                    own = reinterpret(own, AXIS, src=V, dst=Partial)
                values[place] = own
            outs = self.case.call(values)
            note(outs)
            return tuple(outs)

        return run

    def specs(self) -> tuple[P, ...]:
        return tuple(ENTERS[axis_type] for axis_type in self.types.operands.values())


def tried(trial: Trial) -> Finding:
    """Checks one operator, runs it on ranks, and compares."""
    # Only written: a body that changes what it refers to would be checked again.
    types: list[AxisType] = assume_constant([])

    def note(outs: list[Tensor]) -> None:
        types[:] = [types_of(out)[0] for out in outs]

    alone = trial.body(note)

    def forward(*locals_: Tensor) -> tuple[()]:
        alone(*locals_)
        return ()

    if trial.case.name.startswith(("empty", "new_empty")):
        return Finding(skipped="memory not yet written")
    try:
        leaves = trial.leaves()
        with patch.object(verdict, "_TRIES", 0):
            check_program(
                shard_map(forward, mesh=ABSTRACT, in_specs=trial.specs(), out_specs=()), *leaves
            )
            return _held(trial, types, leaves)
    except ShardMapError as error:
        return Finding(refused=str(error).splitlines()[0])
    except Exception as problem:  # a sample that fake tensors, or this build, cannot run
        return Finding(skipped=f"{type(problem).__name__}: {problem}".splitlines()[0])


def _held(trial: Trial, types: Sequence[AxisType], leaves: Sequence[Tensor]) -> Finding:
    """Runs an operator whose results' types are known, and compares."""
    sharded_results = [axis_type == V or (trial.sharded and axis_type == R) for axis_type in types]
    smooth = [x for x in leaves if x.requires_grad]
    state = torch.get_rng_state()
    columns = [_run(trial, leaves, rank) for rank in range(NUM_RANKS)]
    if not torch.equal(state, torch.get_rng_state()):
        return _shared(trial, types, leaves)
    truth = [
        _whole([column[k] for column in columns], axis_type, sharded)
        for k, (axis_type, sharded) in enumerate(zip(types, sharded_results, strict=True))
    ]
    if any(not bool(torch.isfinite(y).all()) for y in truth):
        return Finding(skipped="infinite values")
    finding = Finding(wrong=list(_unequal(columns, types)))
    actual = _on_ranks(trial, types, sharded_results, leaves)
    pairs = [*zip(actual, truth, strict=True)]
    pairs += zip(_gradients(actual, smooth), _gradients(truth, smooth), strict=True)
    finding.wrong += [
        f"result or gradient {number} of types {list(types)}"
        for number, (x, y) in enumerate(pairs)
        if not _equal(x.detach(), y.detach())
    ]
    return finding


def _shared(trial: Trial, types: Sequence[AxisType], leaves: Sequence[Tensor]) -> Finding:
    """Compares the ranks of an operator that draws with each other.

    Which numbers they draw, only a body's own ranks know: runs one after the other, outside of a
    body, do not share what they draw. So each rank's own results leave, side by side.
    """
    sharded_results = [axis_type != Partial for axis_type in types]
    actual = _on_ranks(trial, types, sharded_results, leaves)
    apart = [
        (y, axis_type)
        for y, axis_type, sharded in zip(actual, types, sharded_results, strict=True)
        if sharded
    ]
    columns = [[y[rank] for y, _ in apart] for rank in range(NUM_RANKS)]
    return Finding(wrong=list(_unequal(columns, [axis_type for _, axis_type in apart])))


def _on_ranks(
    trial: Trial,
    types: Sequence[AxisType],
    sharded_results: Sequence[bool],
    leaves: Sequence[Tensor],
) -> list[Tensor]:
    """Runs the operator on ranks; results that are sharded leave one beside the other."""
    specs = tuple(
        P(AXIS) if sharded else P(partial={AXIS} if axis_type == Partial else ())
        for sharded, axis_type in zip(sharded_results, types, strict=True)
    )
    one = trial.body(lambda outs: None)

    def body(*locals_: Tensor) -> tuple[Tensor, ...]:
        outs = one(*locals_)
        return tuple(
            y.unsqueeze(0) if sharded else y
            for y, sharded in zip(outs, sharded_results, strict=True)
        )

    return list(shard_map(body, mesh=RANKS, in_specs=trial.specs(), out_specs=specs)(*leaves))


def _gradients(values: Sequence[Tensor], smooth: Sequence[Tensor]) -> list[Tensor]:
    real = [y for y in values if y.requires_grad]
    return differentiated(real, smooth)


def _run(trial: Trial, leaves: Sequence[Tensor], rank: int) -> list[Tensor]:
    values = {}
    for (place, axis_type), leaf in zip(trial.types.operands.items(), leaves, strict=True):
        own = leaf[rank] if axis_type in (V, Partial) else leaf
        values[place] = own if place in trial.case.smooth else own.clone()
    return trial.case.call(values)


def _whole(column: Sequence[Tensor], axis_type: AxisType, sharded: bool) -> Tensor:
    if sharded:
        return torch.stack(list(column))
    return sum(column[1:], column[0]) if axis_type == Partial else column[0]


def _unequal(columns: Sequence[Sequence[Tensor]], types: Sequence[AxisType]) -> Iterator[str]:
    for number, (axis_type, *column) in enumerate(zip(types, *columns, strict=True)):
        if axis_type not in (V, Partial) and not _equal(column[0].detach(), column[1].detach()):
            yield f"result {number} is typed {axis_type}, and the ranks differ"


def _equal(first: Tensor, second: Tensor) -> bool:
    tolerance = max(1e-8, precision(second)) if is_smooth(second) else 0.0
    return first.dtype == second.dtype and unequal(first, second, tolerance, "") is None


def trials_of(case: Case) -> dict[str, Trial]:
    """Returns the trials that must be accepted, and one P beside R for each operand."""
    places = case.places
    named = {
        "V": Trial(case, Typings(dict.fromkeys(places, V))),
        "R": Trial(case, Typings(dict.fromkeys(places, R))),
        "R, sharded": Trial(case, Typings(dict.fromkeys(places, R)), sharded=True),
        "I": Trial(case, Typings(dict.fromkeys(places, I))),
        "K": Trial(case, Typings(dict.fromkeys(places, K))),
    }
    for number, place in enumerate(places[:3]):
        types = Typings({**dict.fromkeys(places, R), place: Partial})
        named[f"P in {number}"] = Trial(case, types)
        types = Typings({**dict.fromkeys(places, R), place: V})
        named[f"V in {number}"] = Trial(case, types)
    return named


FLOORS: Final = ("V", "R", "R, sharded", "I")

GAPS: Final = {
    "and diverge": "data-dependent",
    "without data": "data-dependent",
    "depends on data": "data-dependent",
    "Python value": "data-dependent",
    "plain Python number": "data-dependent",
    "weights sum to zero": "a check in torch's C++, which may fail",
    "data is not allocated yet": "the same, in istft",
    "_segment_reduce_backward": "its backward is not known to be linear",
    "abs over axis 'r' of Partial": "logcumsumexp's backward splits the cotangent by its sign",
    "matrix_exp": "its backward is not known to be linear",
    "linear_cross_entropy_batch_chunked": "an operator of torch that writes no derivative down",
}
"""Refusals of what the floors ask for, by a part of the text."""


def is_excused(trial: str, case: Case, refused: str) -> bool:
    """Returns whether a floor is missed for a known reason; what draws is V, and meets no I."""
    met = any(each in refused for each in ("of I and V", "gets a gradient that is V"))
    draws = trial == "I" and met and case_draws(case)
    return draws or any(part in refused for part in GAPS)


def case_draws(case: Case) -> bool:
    """Returns whether an operator draws random numbers, as far as its sample can show it."""
    if not any(case.leaves[place].numel() for place in case.places):
        return True
    state = torch.get_rng_state()
    case.call({})
    return not torch.equal(state, torch.get_rng_state())

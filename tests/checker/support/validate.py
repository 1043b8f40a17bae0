"""Compares a row with numbers: what it claims of one call is tried on two and three ranks.

Operands get types, `type_call` says the result's, and the call runs once per rank:

* P: the sum of the results depends on the operands' sums alone (another split of each P among the
  ranks gives the same), and is the operation on the sums.
* Z: the result is zero. R or K: the ranks agree, each with a random seed of its own.
* V or a refusal claim nothing.
"""

import itertools
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final
from unittest.mock import patch

import torch
from torch import Tensor
from torch._ops import OpOverload

from shardmap_torch.checker.rules import infer as typing_of_calls
from shardmap_torch.checker.rules.infer import name_arguments, type_call
from shardmap_torch.checker.rules.lattice import Refusal
from shardmap_torch.checker.rules.rule import Row
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.types import AxisType, K, Partial, R, V, Z
from shardmap_torch.validate.numbers import refute, shifted, tolerance_of
from tests.checker.support.calls import Call
from tests.checker.support.operands import drawn

UNWRITTEN: Final = ("empty", "resize")
"""Memory not yet written: typed zero because nothing may be made of it."""

Run = Callable[[Mapping[str, Any]], Sequence[Any]]


@dataclass
class Findings:
    """Findings of trying one row.

    Attributes:
        wrong: the claims that do not hold.
        shown: what was seen to hold: `("P", name)`, `("unread", name)`, `("Z", "")`, `("R", "")`.
    """

    wrong: list[str] = field(default_factory=list)
    shown: set[tuple[str, str]] = field(default_factory=set)


def call_by_name(op: OpOverload, arguments: Mapping[str, Any]) -> list[Any]:
    """The results of a call as a list, lists of tensors kept together."""
    names = [a.name for a in op._schema.arguments]
    keywords = {a.name for a in op._schema.arguments if a.kwarg_only}
    fresh = {name: _copied(arguments[name]) for name in names if name in arguments}
    out = op(
        *(fresh[name] for name in names if name not in keywords and name in fresh),
        **{name: value for name, value in fresh.items() if name in keywords},
    )
    return list(out) if isinstance(out, tuple) else [out]


def _copied(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.clone()
    return [_copied(item) for item in value] if isinstance(value, list | tuple) else value


Unit = tuple[str, int | None]
"""One tensor operand: an argument's name, and its position where the argument is a list."""


def units_of(arguments: Mapping[str, Any], real: bool) -> list[Unit]:
    """The floating tensors among the arguments, or those of integers and bools."""
    found: list[Unit] = []
    for name, value in arguments.items():
        items = value if isinstance(value, list | tuple) else [value]
        for i, item in enumerate(items):
            if isinstance(item, Tensor) and item.numel() and is_smooth(item) == real:
                found.append((name, None if isinstance(value, Tensor) else i))
    return found


def value_at(arguments: Mapping[str, Any], unit: Unit) -> Tensor:
    name, index = unit
    value = arguments[name] if index is None else arguments[name][index]
    assert isinstance(value, Tensor)
    return value


def with_values(arguments: Mapping[str, Any], values: Mapping[Unit, Tensor]) -> dict[str, Any]:
    """The arguments with other tensors in their places."""
    changed = dict(arguments)
    for (name, index), value in values.items():
        if index is None:
            changed[name] = value
        else:
            changed[name] = list(changed[name])
            changed[name][index] = value
    return changed


def assignments(units: Sequence[Unit], rng: random.Random) -> Iterator[dict[Unit, AxisType]]:
    """Types of operands: each alone not R, each pair not R, all alike, and random ones."""
    types = (Partial, V, Z)
    yield dict.fromkeys(units, R)
    for axis_type in types:
        yield dict.fromkeys(units, axis_type)
    for unit, axis_type in itertools.product(units[:8], types):
        yield {**dict.fromkeys(units, R), unit: axis_type}
        yield {**dict.fromkeys(units, Z), unit: axis_type}
    pairs = list(itertools.combinations(units, 2))
    for pair in rng.sample(pairs, min(len(pairs), 45)):
        for first, second in ((Partial, Partial), (Partial, V), (V, Partial), (V, V)):
            yield {**dict.fromkeys(units, R), pair[0]: first, pair[1]: second}
    for name in sorted({name for name, _ in units}):
        yield {unit: R if unit[0] == name else Partial for unit in units}
    for _ in range(6):
        yield {unit: rng.choice((Partial, V, R, Z)) for unit in units}


def whole_assignments(arguments: Mapping[str, Any]) -> Iterator[dict[Unit, AxisType]]:
    """Each integer or bool operand varies alone, beside equal and beside zero ones."""
    real = units_of(arguments, real=True)
    for unit in units_of(arguments, real=False):
        for axis_type in (R, R, Z):
            yield {**dict.fromkeys(real, axis_type), unit: V}


def _check_integers(
    op: OpOverload, row: Row, arguments: Mapping[str, Any], findings: Findings
) -> None:
    """Nothing is linear in an index or a mask: operands that are integers beside floating ones."""
    real = {name for name, _ in units_of(arguments, real=True)}
    whole = {name for name, _ in units_of(arguments, real=False)} - real
    named = {name for each in (row.results or (row,)) for term in each.linear for name in term}
    if real and (bad := sorted(whole & named)):
        findings.wrong.append(f"{op}: linear in {bad}, which are integers")


@dataclass
class Trial:
    """One call with types for its operands, ready to run on each rank."""

    op: OpOverload
    arguments: Mapping[str, Any]
    types: Mapping[Unit, AxisType]
    num_ranks: int
    generator: torch.Generator

    def __post_init__(self) -> None:
        base = {unit: value_at(self.arguments, unit) for unit in self.types}
        self.values: list[dict[Unit, Tensor]] = [
            {unit: self._value(unit, tensor, rank) for unit, tensor in base.items()}
            for rank in range(self.num_ranks)
        ]

    def _value(self, unit: Unit, base: Tensor, rank: int) -> Tensor:
        axis_type = self.types[unit]
        if axis_type in (R, K):
            return base
        return torch.zeros_like(base) if axis_type == Z else drawn(unit[0], base, self.generator)

    def run(self, values: Mapping[Unit, Tensor], seed: int) -> list[Any]:
        torch.manual_seed(seed)
        return call_by_name(self.op, with_values(self.arguments, values))

    def per_rank(self) -> list[list[Any]]:
        return [self.run(values, seed) for seed, values in enumerate(self.values)]

    def resplit(self) -> list[list[Any]]:
        """Every P as another sum of as many addends."""
        values = [dict(each) for each in self.values]
        for unit, axis_type in self.types.items():
            if axis_type == Partial:
                moved = shifted([each[unit] for each in values], self.generator)
                for each, tensor in zip(values, moved, strict=True):
                    each[unit] = tensor
        return [self.run(each, seed) for seed, each in enumerate(values)]

    def meant(self) -> list[Any]:
        """The operation on what the operands mean: sums of P, and of V beside a P."""
        values = {
            unit: sum((each[unit] for each in self.values[1:]), self.values[0][unit])
            if axis_type in (Partial, V)
            else self.values[0][unit]
            for unit, axis_type in self.types.items()
        }
        return self.run(values, 0)


def same(first: Any, second: Any) -> bool:
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        if first.shape != second.shape:
            return False
        not_numbers = (first != first) & (second != second)  # isnan, for every dtype
        return bool(((first == second) | not_numbers).all())
    if isinstance(first, list | tuple):
        return all(itertools.starmap(same, zip(first, second, strict=True)))
    return bool(first == second)


def flat(results: Sequence[Any], zipped: bool) -> list[Any]:
    """One entry per outcome: per position for lists processed position by position."""
    if not zipped:
        return [
            item
            for result in results
            for item in (result if isinstance(result, list | tuple) else [result])
        ]
    return [item for result in results for item in result]


def outcome_of(
    row: Row, outcomes: Sequence[Any], results: Sequence[Any], place: int, flattened: int
) -> Any:
    """The outcome that speaks about one flattened result."""
    if row.zipped:
        return outcomes[place % len(outcomes)]
    return outcomes[place] if len(outcomes) == flattened else outcomes[0]


def types_of(
    op: OpOverload, row: Row, arguments: Mapping[str, Any], types: Mapping[Unit, AxisType]
) -> list[Any]:
    """`type_call` with `row` in the table's place, on one axis."""
    by_id = {id(value_at(arguments, unit)): axis_type for unit, axis_type in types.items()}
    with patch.object(typing_of_calls, "row_of", lambda _: row):
        return type_call(op, arguments, lambda tensor: (by_id.get(id(tensor), R),), 1)


def _told_apart(types: Mapping[Unit, AxisType], row: Row) -> bool:
    """Returns whether what is meant can be computed: not with two V in one product."""
    varying = {name for (name, _), axis_type in types.items() if axis_type == V}
    rows = row.results or (row,)
    return all(len(varying & set(term)) < 2 for each in rows for term in each.linear)


def check_trial(row: Row, trial: Trial, outcomes: Sequence[Any], findings: Findings) -> None:
    """Runs one trial and compares it with the outcomes."""
    try:
        ranks = trial.per_rank()
    except (RuntimeError, ValueError):
        return
    results = [flat(each, row.zipped) for each in ranks]
    claims = [
        outcome_of(row, outcomes, ranks[0], place, len(results[0]))
        for place in range(len(results[0]))
    ]
    for place, claim in enumerate(claims):
        if not isinstance(claim, Refusal):
            column = [each[place] for each in results]
            problem = _check_claim(row, trial, claim[0], column, place, findings)
            if problem:
                types = {f"{n}[{i}]": k for (n, i), k in trial.types.items()}
                findings.wrong.append(f"{trial.op} result {place}: {problem} with {types}")


def _check_claim(
    row: Row, trial: Trial, claim: AxisType, column: list[Any], place: int, findings: Findings
) -> str | None:
    if claim == Z:
        if any(word in str(trial.op) for word in UNWRITTEN):
            findings.shown.add(("Z", ""))
            _note(findings, "unread", trial, (V, Partial))
            return None
        fault = refute(Z, [each for each in column if isinstance(each, Tensor)], None, None, 0.0)
        if fault is not None:
            return str(fault)
        findings.shown.add(("Z", ""))
    elif claim == Partial:
        return _check_partial(row, trial, column, place, findings)
    if claim in (R, K, Z):
        if not all(same(each, column[0]) for each in column):
            return f"typed {claim}, and the ranks differ"
        findings.shown.add(("R", ""))
        _note(findings, "unread", trial, (V, Partial))
    return None


def _note(findings: Findings, what: str, trial: Trial, types: tuple[AxisType, ...]) -> None:
    findings.shown |= {
        (what, name) for (name, _), axis_type in trial.types.items() if axis_type in types
    }


def _check_partial(
    row: Row, trial: Trial, column: list[Any], place: int, findings: Findings
) -> str | None:
    if column[0] is None:
        return None
    if not is_smooth(column[0]) or not column[0].numel():
        return None  # refused elsewhere: an integer or bool result of a P; or nothing to see
    tolerance = tolerance_of(
        [column[0].dtype, *(tensor.dtype for tensor in trial.values[0].values())]
    )
    here = sum(column[1:], column[0])
    if not bool(torch.isfinite(here).any()):
        return None
    resplit = [flat(each, row.zipped)[place] for each in trial.resplit()]
    told = _told_apart(trial.types, row)
    meant = flat(trial.meant(), row.zipped)[place] if told else None
    fault = refute(Partial, column, resplit, meant, tolerance)
    if fault is not None:
        return f"typed P, and {fault}"
    if bool((here != 0).any()):
        _note(findings, "P", trial, (Partial,))
    return None


def _are_numbers(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(x, float) for x in value)


def variants(row: Row, arguments: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The call, and the call with the numbers that stand in a term zero and not zero."""
    yield dict(arguments)
    names = {name for each in (row.results or (row,)) for term in each.linear for name in term}
    for name in sorted(names):
        if isinstance(arguments.get(name), int | float) and not isinstance(arguments[name], bool):
            yield {**arguments, name: 0}
            yield {**arguments, name: 1.5}
        elif _are_numbers(arguments.get(name)):
            yield {**arguments, name: [0 for _ in arguments[name]]}


def validate(
    op: OpOverload, row: Row, recorded: Sequence[Call], seed: int = 0, stop: bool = False
) -> Findings:
    """Tries all that `row` claims about the recorded calls of `op`.

    Args:
        op: the overload.
        row: its row, or a mutant of it.
        recorded: calls to try it on.
        seed: of the random operands.
        stop: at the first wrong claim.
    """
    findings, rng = Findings(), random.Random(seed)
    generator = torch.Generator().manual_seed(seed)
    for args, kwargs in recorded:
        _check_draws(op, row, name_arguments(op, args, kwargs), generator, findings)
        for arguments in variants(row, name_arguments(op, args, kwargs)):
            types_to_try = list(assignments(units_of(arguments, real=True), rng))
            types_to_try += whole_assignments(arguments)
            _check_integers(op, row, arguments, findings)
            for number, types in enumerate(types_to_try):
                outcomes = types_of(op, row, arguments, types)
                if all(isinstance(each, Refusal) or each[0] == V for each in outcomes):
                    continue
                trial = Trial(op, arguments, types, 2 + number % 2, generator)
                check_trial(row, trial, outcomes, findings)
                if stop and findings.wrong:
                    return findings
    return findings


def _check_draws(
    op: OpOverload,
    row: Row,
    arguments: Mapping[str, Any],
    generator: torch.Generator,
    findings: Findings,
) -> None:
    """A draw is V whatever it reads; with equal seeds it still shows that it does not read."""
    for name in row.unread:
        value = arguments[name]
        if not typing_of_calls.signature_of(op).random or not isinstance(value, Tensor):
            continue
        changed = {**arguments, name: drawn(name, value, generator)}
        results = []
        for each in (arguments, changed):
            torch.manual_seed(0)
            results.append(call_by_name(op, each))
        if not same(*results):
            findings.wrong.append(f"{op}: draws, and reads {name}")
        findings.shown.add(("unread", name))


def missing(op: OpOverload, row: Row, findings: Findings) -> set[tuple[str, str]]:
    """The parts of a row that no trial has shown."""
    rows = row.results or (row,)
    wanted = {("P", name) for each in rows for term in each.linear for name in term}
    wanted |= {("unread", name) for each in rows for name in each.unread}
    if row.zero:
        wanted.add(("Z", ""))
    numbers = {a.name for a in op._schema.arguments if "Tensor" not in str(a.type)}
    return {(what, name) for what, name in wanted - findings.shown if name not in numbers}

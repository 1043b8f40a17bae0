"""Tries global strictness on PyTorch's operator database, against one device.

For one operator, one sample and one spec for each operand: the body is checked on an abstract mesh,
which tells how its results are sharded; then real ranks run it on their shards, and what they give,
put together by those specs, must be what the operator gives on the global operands.

Writes a section of docs/coverage.md:
.venv/bin/python -m tests.checker.support.global_fuzz
"""

import itertools
import math
import random
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.testing._internal.common_methods_invocations import op_db

from shardmap_torch import P, R, ShardMapError, all_reduce, assume_constant, make_mesh, shard_map
from shardmap_torch.checker.interpreter.interpreter import Interpreter, current_interpreter
from shardmap_torch.checker.spmd.equivalence import Relation
from tests.checker.support import page
from tests.checker.support.fuzz import Case, cases, written_in_place
from tests.checker.support.fuzz_all import dtypes_of, name_of, runs_here
from tests.checker.support.layouts import layouts_alone

# Samples have dims of 5 and 10, mostly.
SIZES: Final = {"a": 5, "b": 2}
ABSTRACT: Final = make_mesh(tuple(SIZES.values()), tuple(SIZES), kind="abstract")
RANKS: Final = make_mesh(
    tuple(SIZES.values()), tuple(SIZES), kind="simulated", simulate="ranks", device="cpu"
)


@dataclass
class Score:
    """Findings about an operator; `sharded`: accepted with an operand that is sharded."""

    name: str
    accepted: int = 0
    sharded: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)


def specs_of(x: Tensor, axes: Sequence[str]) -> list[P]:
    """Every spec of one tensor over some axes."""
    found = [P(*[None] * x.ndim)]
    for axis in axes:
        more = []
        for spec in found:
            for dim in range(x.ndim):
                entries = [_axes(entry) for entry in spec.entries]
                entries[dim] = (*entries[dim], axis)
                count = math.prod(SIZES[name] for name in entries[dim])
                if x.shape[dim] and x.shape[dim] % count == 0:
                    more.append(P(*[entry or None for entry in entries]))
        found += more
    return found


def _axes(entry: Any) -> tuple[str, ...]:
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


def layouts(case: Case, rng: random.Random, count: int) -> Iterator[dict[int, P]]:
    """Cuts of all operands: every one by a single axis if these are few, then at random by both."""
    places = [i for i, x in enumerate(case.leaves) if isinstance(x, Tensor)]
    single = [specs_of(case.leaves[i], ["a"]) for i in places]
    if math.prod(map(len, single)) <= count:
        every = list(itertools.product(*single))
        count -= len(every)
        yield from (dict(zip(places, specs, strict=True)) for specs in every)
    options = {i: specs_of(case.leaves[i], tuple(SIZES)) for i in places}
    some = [spec for found in options.values() for spec in found if spec.mentioned]
    for attempt in range(count if some else 0):
        first = rng.choice(some)
        alike = attempt % 2 == 0
        yield {
            i: first if alike and first in found else rng.choice(found)
            for i, found in options.items()
        }


class WrongError(Exception):
    """The ranks give something else than one device."""


def try_cuts(case: Case, specs: dict[int, P], grad: bool) -> str | None:
    """Returns why it is refused, or None.

    Raises:
        WrongError: it is accepted, and the ranks give other values, or other gradients.
    """
    places = list(specs)
    # Only written: a body that changes what it refers to would be checked again.
    found: list[P | None] = assume_constant([])
    pending: list[Pending] = assume_constant([])  # what is left to take of each result
    taken: list[Pending] = []

    def body(*values: Tensor) -> tuple[Tensor, ...]:
        out = case.call(dict(zip(places, values, strict=True)))
        interpreter = current_interpreter()
        judged = interpreter is not None and interpreter.observer.judges
        if interpreter is not None and judged:
            pending[:] = [_pending(interpreter, y) for y in out]
        out = [_finished(y, each) for y, each in zip(out, taken or [()] * len(out), strict=True)]
        if interpreter is not None and judged:
            found[:] = [interpreter.observer.spec_of(interpreter.fakify(y)) for y in out]
        return tuple(out)

    def probe(*values: Tensor) -> tuple[()]:
        body(*values)
        return ()

    values = [case.leaves[i].clone().requires_grad_(grad and i in case.smooth) for i in places]
    in_specs = tuple(specs.values())
    try:
        probed = shard_map(probe, mesh=ABSTRACT, in_specs=in_specs, out_specs=P(), check="global")
        with layouts_alone():
            probed(*values)
            if any(pending):
                taken[:] = pending
                probed(*values)
            if not found or None in found:
                return "no result"
            outs = tuple(found)
            ranks = shard_map(body, mesh=RANKS, in_specs=in_specs, out_specs=outs, check="global")
            got = ranks(*values)
    except ShardMapError as error:
        return str(error)
    except (RuntimeError, IndexError, ValueError, TypeError, AssertionError) as error:
        return f"on shards: {error}"  # of the operator itself
    want, again = (case.call(dict(zip(places, values, strict=True))) for _ in range(2))
    if not all(torch.allclose(x, y, equal_nan=True) for x, y in zip(want, again, strict=True)):
        return DRAWS_NUMBERS
    _compare(got, want, values)
    return None


DRAWS_NUMBERS: Final = "it draws numbers, which are others whenever it is called"


Pending = Sequence[tuple[str, str]]
"""Axes, each with what is to be taken over its ranks, "max", "min" or "mean"."""


def _pending(interpreter: Interpreter, y: Tensor) -> Pending:
    observer = interpreter.observer
    assert isinstance(observer, Relation)
    sums = observer._notes.sums(interpreter.fakify(y))
    return sorted([*sums.pending, *((axis, "mean") for axis in sums.means & sums.partial)])


def _finished(y: Tensor, pending: Pending) -> Tensor:
    for axis, kind in pending:
        y = all_reduce(y, axis, dst=R, op=kind)  # type: ignore[arg-type]  # one of three
    return y


def _compare(got: Sequence[Tensor], want: Sequence[Tensor], operands: Sequence[Tensor]) -> None:
    pairs = list(zip(got, want, strict=True))
    smooth = [y for y in want if y.requires_grad]
    leaves = [x for x in operands if x.requires_grad]
    if leaves and smooth:
        pairs += zip(_gradients(got, leaves), _gradients(want, leaves), strict=True)
    try:
        for mine, right in pairs:
            torch.testing.assert_close(mine, right, rtol=1e-8, atol=1e-10, equal_nan=True)
    except AssertionError as wrong:
        raise WrongError(str(wrong).splitlines()[0]) from wrong


def _gradients(outputs: Sequence[Tensor], leaves: Sequence[Tensor]) -> list[Tensor]:
    """Differentiates a sum of the results in which each entry has a weight of its own."""
    smooth = [y for y in outputs if y.requires_grad]
    seeds = [torch.linspace(1, 2, y.numel()).reshape(y.shape).to(y.dtype) for y in smooth]
    found = torch.autograd.grad(smooth, leaves, seeds, allow_unused=True)
    return [torch.zeros_like(x) if g is None else g for x, g in zip(leaves, found, strict=True)]


def fuzz(info: Any, samples: int, draws: int, until_wrong: bool = False) -> Score:
    """All trials of one operator, its in-place variant included, or those up to a wrong one."""
    score = Score(name_of(info))
    for case, specs in _trials(info, samples, draws):
        if not _note(score, case, specs, grad=True):
            _note(score, case, specs, grad=False)
        if until_wrong and score.wrong:
            break
    return score


def _trials(info: Any, samples: int, draws: int) -> Iterator[tuple[Case, dict[int, P]]]:
    rng = random.Random(info.name)
    variant = written_in_place(info)
    for dtype in dtypes_of(info, False):
        for op in (None, variant) if variant else (None,):
            for case in cases(info, dtype, samples, op):
                for each in (case, *counted_from_back(case)):
                    yield from ((each, specs) for specs in layouts(each, rng, draws))


def counted_from_back(case: Case) -> Iterator[Case]:
    """Yields the case with each argument that turns out to be a dim counted from the last one."""
    numbers = {x.ndim + more for x in case.leaves if isinstance(x, Tensor) for more in (0, 1)}
    wanted = _results(case)
    if wanted is None:
        return
    for place, dim in enumerate(case.leaves):
        for ndim in numbers if type(dim) is int else ():
            leaves = [*case.leaves[:place], dim - ndim, *case.leaves[place + 1 :]]
            other = replace(case, leaves=leaves)
            found = _results(other) if 0 <= dim < ndim else None
            if found is None or len(found) != len(wanted):
                continue
            if all(map(torch.equal, found, wanted)):
                yield other


def _results(case: Case) -> list[Tensor] | None:
    """Runs a case; None where torch refuses it, as what an operator cannot write in place."""
    try:
        return case.call({})
    except (IndexError, RuntimeError, TypeError, ValueError):
        return None


def _note(score: Score, case: Case, specs: dict[int, P], grad: bool) -> bool:
    """Counts one trial; whether it was accepted."""
    try:
        refusal = try_cuts(case, specs, grad)
    except WrongError as wrong:
        score.wrong.append(f"{list(specs.values())}: {wrong}")
        return True
    if refusal is None:
        score.accepted += 1
        score.sharded += any(spec.mentioned for spec in specs.values())
    elif not grad:
        score.refused[refusal.splitlines()[0].split(": ", 1)[-1][:120]] += 1
    return refusal is None


def is_drawn(info: Any) -> bool:
    """Returns whether it draws numbers, or signs, that are others on one device."""
    return name_of(info) in DRAWN


DRAWN: Final = frozenset(
    {"uniform", "normal", "exponential", "cauchy", "geometric", "log_normal", "bernoulli"}
    | {"normal in_place", "normal number_mean", "rand_like", "randn_like", "randint_like"}
    | {"linalg.eig", "nn.functional.dropout", "nn.functional.feature_alpha_dropout with_train"}
)


SAMPLES: Final = 3
DRAWS: Final = 20


def section(scores: Sequence[Score], draws: int) -> str:
    """Writes the section on operators under global strictness of the page on coverage."""
    never = [f"`{score.name}`" for score in scores if not score.sharded]
    accepted = sum(score.accepted for score in scores)
    refused = sum(score.refused.total() for score in scores)
    wrong = sum(len(score.wrong) for score in scores)
    text = (
        f"{len(scores)} operators were tried, {SAMPLES} samples of each sharded in at most "
        f"{draws} ways over axes of {' and '.join(map(str, SIZES.values()))} ranks: "
        f"{accepted + refused} trials, {accepted} accepted, "
        f"{sum(score.sharded for score in scores)} of these with an operand "
        "that is sharded. Values and gradients on rank threads were compared with the operator "
        f"on the global samples: {wrong} were wrong."
    )
    others = (
        f"{len(scores) - len(never)} operators are accepted with some operand sharded. The "
        f"others, of which some have no operand that could be sharded: {', '.join(never)}."
    )
    return page.section('Operators under check="global"', f"global_fuzz {draws}", text, others)


def main() -> int:
    """All of op_db; a number on the command line says how many specs are drawn."""
    draws = page.begin(DRAWS)
    scores = [
        fuzz(info, SAMPLES, draws) for info in op_db if runs_here(info) and not is_drawn(info)
    ]
    wrong = [f"{score.name}: wrong: {text}" for score in scores for text in score.wrong]
    return page.finish(section(scores, draws), wrong)


if __name__ == "__main__":
    sys.exit(main())

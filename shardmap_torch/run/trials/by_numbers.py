"""Global strictness where one device has no such steps: rings, pipelines, exchanges of halos.

A body that sends values to other ranks over some axes cannot be compared with one device step by
step over these. So it is compared in two parts. Over the other axes it is proven to do what it does
where they have one rank. Over these it is tried: from random numbers the ranks have to compute the
results and gradients of one device. Two analytic functions that are equal there are equal, but for
chance; so all operators have to be analytic, or in pieces all of which were met.
"""

import contextvars
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from operator import ne
from typing import Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch.backends.threads import thread_state
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.api import ShapeDtype, stand_ins
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.ir.repairs import NONE
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict, attempt, detached, verify
from shardmap_torch.core.ambient import SILENT
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import FakeTensor, forward_level
from shardmap_torch.errors import ShardTypeError, SpecError
from shardmap_torch.mesh import Mesh
from shardmap_torch.run.trials.comparison import Comparison, RefutedError
from shardmap_torch.run.trials.draws import Like
from shardmap_torch.run.trials.runs import Program
from shardmap_torch.run.trials.watch import UntriedError

T = TypeVar("T")
Axes = frozenset[str]

_RANKS: Final = 64
_WORK: Final = 100_000_000
"""Ranks, and entries that they compute, up to which a program is tried: some seconds."""

_SHOWN: Final = 5
"""Maximal number of lines that are named."""

_LARGE: Final = (
    "{}, and at most {:,} are tried. Check it at smaller sizes, and put what sends into a "
    "local_region, which validate_rule tries"
)


def by_numbers(call: Call, strictness: Strictness, error: ShardTypeError) -> Verdict | None:
    """Returns a verdict on a body that global strictness refuses, if random numbers bear it out.

    Adds to the error why they do not.

    Args:
        call: the call.
        strictness: that which was asked for.
        error: why its steps are not those of one device.

    Raises:
        ShardTypeError: the ranks compute something else.
    """
    compared = _compared(call.mesh, strictness)
    verdict = _well_typed(call)
    sending = [] if verdict is None else _sending(verdict, compared)
    axes = frozenset(axis for e in sending for axis in _axes_of(e)) & compared
    axes |= frozenset() if verdict is None else verdict.traits.asks & compared
    if not axes:
        return None
    over = ", ".join(repr(axis) for axis in call.mesh.axis_names if axis in axes)
    try:
        proven = verify(call, (compared - axes) or "local")
    except (ShardTypeError, SpecError) as other:
        first = str(other).partition("\n")[0]
        if not str(error).startswith(first):
            _note(error, f"Nor can it be tried with numbers over {over}: {first}")
        return None
    except Exception:  # of the user's code, behind the first error
        return None
    lines = list(dict.fromkeys(f"  {e.name}  # {e.site}" for e in sending))[:_SHOWN]
    try:
        comparison = _compare(call, proven, compared, axes)
    except RefutedError as refuted:
        if "local_region" not in str(error):  # it tells more
            _note(error, f"Tried with numbers over {over} as well: {refuted}.")
            return None
        raise ShardTypeError(_REFUTED.format(call.name, over, refuted, "\n".join(lines))) from None
    except _UncheckedError:  # which is what the error is about
        return None
    except UntriedError as untried:
        _note(error, f"Nor can it be tried with numbers over {over}: {untried}.")
        return None
    averages = proven.traits.averages or comparison.averages
    return replace(
        proven,
        traits=replace(proven.traits, averages=averages),
        tried="\n".join([comparison.report(over), *lines]),
    )


_REFUTED: Final = (
    "{}: check='global': tried with numbers over {}, it is another program than on one device: {}."
    "\nOne device has no step for:\n{}\nFix: where an axis has one rank, the body must compute the "
    "same: compare which block each rank has after each step, and what it does with it."
)


def _note(error: ShardTypeError, line: str) -> None:
    error.args = (f"{error}\n{line}",)


class _UncheckedError(Exception):
    """The body fails where some axes have one rank."""


def _compared(mesh: Mesh, strictness: Strictness) -> Axes:
    """Returns the axes over which strictness is global."""
    if isinstance(strictness, str):
        return frozenset(mesh.axis_names if strictness == "global" else ())
    return frozenset(mesh.finest(sorted(strictness)))


def _sending(verdict: Verdict, compared: Axes) -> list[Equation]:
    """Returns the collectives over compared axes that one device does not have.

    Those whose blocks are one more dim count only where there are no others.
    """
    equations = [e for e in verdict.equations if not compared.isdisjoint(_axes_of(e))]
    return list(filter(_sends, equations)) or list(filter(_stacks, equations))


def _well_typed(call: Call) -> Verdict | None:
    """Returns a local verdict, also on a step whose results are not differentiated."""
    for leaves in (call.leaves, detached(call)):
        try:
            return attempt(replace(call, leaves=leaves), NONE, "local")
        except Exception:  # of the user's code too; what is shown is the first error
            continue
    return None


def _axes_of(equation: Equation) -> tuple[str, ...]:
    return () if equation.collective is None else equation.collective.axes


def _sends(equation: Equation) -> bool:
    collective = equation.collective
    assert collective is not None  # by the filter
    sizes = {*(collective.sizes or ()), *(collective.concat_sizes or ())}
    return not equation.backward and (collective.movement.numbered or len(sizes) > 1)


def _stacks(equation: Equation) -> bool:
    collective = equation.collective
    assert collective is not None  # by the filter
    return not equation.backward and not collective.tiled


def _compare(call: Call, proven: Verdict, compared: Axes, axes: Axes) -> Comparison:
    """Tries the program with ranks along `axes`, and those that are not compared, on its own.

    Raises:
        RefutedError: it does not compute what it does where `axes` have one rank.
        UntriedError: random numbers cannot decide about it.
    """
    state = thread_state()
    likes = {at: _like(call.leaves[at], proven) for at in call.crossing}
    strictness: Strictness = (compared - axes) or "local"
    names = frozenset(call.mesh.axis_names)

    def compare() -> Comparison:
        with state.entered():
            ranks = _program(call, likes, strictness, (names - compared) | axes)
            one = _program(call, likes, strictness, names - compared)
            work = max(ranks.work, one.work)
            if work > _WORK:
                raise UntriedError(_LARGE.format(f"ranks would compute {work:,} entries", _WORK))
            _require_same_casts(proven, ranks.verdict, axes)
            comparison = Comparison(ranks, one)
            comparison.run()
        return comparison

    return _aside(compare)


def _aside(work: Callable[[], T]) -> T:
    """Works on another thread, where neither modes nor transforms of torch are active."""
    context = contextvars.copy_context()
    context.run(SILENT.set, True)
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(context.run, work).result()


def _like(leaf: Tensor, proven: Verdict) -> Like:
    differentiates = can_receive_gradient(leaf) or forward_level() >= 0
    grad = differentiates and is_real(leaf.dtype) and proven.refusal is None
    device = torch.device("cpu") if leaf.is_meta or isinstance(leaf, FakeTensor) else leaf.device
    return Like(leaf.shape, leaf.dtype, device, grad)


def _program(call: Call, likes: dict[int, Like], strictness: Strictness, axes: Axes) -> Program:
    """Checks the call where only these axes have several ranks."""
    full = call.mesh
    sizes = tuple(full.shape[axis] if axis in axes else 1 for axis in full.axis_names)
    mesh = Mesh(
        *(full.axis_names, sizes, "simulated", full.device, "ranks"),
        aliases=full.aliases,
        full=full,
    )
    if mesh.size > _RANKS:
        raise UntriedError(_LARGE.format(f"there are {mesh.size} ranks", _RANKS))
    leaves = list(call.leaves)
    for at, like in likes.items():
        [leaves[at]] = stand_ins((ShapeDtype(tuple(like.shape), like.dtype, like.grad),))
    there = replace(call, mesh=mesh, leaves=leaves, out_matches=Memo())
    try:
        verdict = attempt(there, NONE, strictness)
    except Exception as error:  # the user's code may raise anything
        raise _UncheckedError from error
    return Program(there, verdict, likes)


def _require_same_casts(proven: Verdict, tried: Verdict, axes: Axes) -> None:
    """Requires that the boundary does the same over the axes that are tried."""
    if any(map(ne, _casts(proven, axes), _casts(tried, axes))):
        raise UntriedError("without ranks along the other axes it has other casts at its boundary")


def _casts(verdict: Verdict, axes: Axes) -> Sequence[object]:
    specs = [
        None if s is None else [(a, s.types.get(a)) for a in sorted(axes)] for s in verdict.specs
    ]
    exits = {
        at: [cast for cast in casts if not axes.isdisjoint(cast.axes)]
        for at, casts in verdict.exits.items()
    }
    return specs, exits

"""Global strictness where one device has no such steps: rings, pipelines, exchanges of halos.

A body that sends values to other ranks over some axes cannot be compared with one device step by
step over these. So it is compared in two parts. Over the other axes it is proven to do what it does
where they have one rank. Over these it is tried: from random numbers the ranks have to compute the
results and gradients of one device. Two analytic functions that are equal there are equal, but for
chance; so all operators have to be analytic, or in pieces all of which were met.
"""

import contextvars
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from operator import eq, ne
from typing import Final, TypeVar

import torch
from torch import Tensor

from shardmap_torch.backends.threads import thread_state
from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.api import ShapeDtype, stand_ins
from shardmap_torch.checker.interpreter.proposals import other_ops
from shardmap_torch.checker.ir.program import Equation
from shardmap_torch.checker.ir.repairs import (
    NONE,
    Repair,
    Spot,
    propose,
    rejected,
    rejection_of,
)
from shardmap_torch.checker.rules.infer import is_real
from shardmap_torch.checker.spmd.ops.advice import PER_RANK, PICKED, SENT
from shardmap_torch.checker.spmd.sharded import PARTS
from shardmap_torch.checker.verify.repairing import with_specs
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import (
    Verdict,
    attempt,
    detached,
    verify,
)
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.ambient import SILENT
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import FakeTensor, forward_level
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.record.recorder import ProgramRecorder
from shardmap_torch.run.trials.comparison import Comparison, RefutedError
from shardmap_torch.run.trials.draws import Like
from shardmap_torch.run.trials.noise import Drawn
from shardmap_torch.run.trials.runs import COUNTS, MAX_RANKS, Program, scales
from shardmap_torch.run.trials.watch import UntriedError

T = TypeVar("T")
Axes = frozenset[str]
Likes = Mapping[int, Like]

_WORK: Final = 100_000_000
"""Entries that ranks compute up to which a program is tried: some seconds."""

_SHOWN: Final = 5
"""Maximal number of lines that are named."""

_LARGE: Final = (
    "{}, at most {} ranks and {:,} entries are tried, and at smaller sizes the body does something "
    "else. Check it at smaller sizes, or put what sends into a local_region, which validate_rule "
    "tries"
)


def by_numbers(
    call: Call, strictness: Strictness, error: ShardTypeError, repair: Repair = NONE
) -> Verdict | None:
    """Returns a verdict on a body that layouts do not prove, if random numbers bear it out.

    Adds to the error why they do not.

    Args:
        call: the call.
        strictness: that which was asked for.
        error: why its steps are not those of one device.
        repair: what is changed of the body.
    """
    compared = _compared(call.mesh, strictness)
    typed = _well_typed(call, repair)
    if typed is None:
        return None
    promised = frozenset(axis for _, named in typed.traits.promises for axis in named)
    axes, proven, others = _split(call, compared, typed.traits.asks | promised, repair)
    if proven is None:
        return None
    over = ", ".join(repr(axis) for axis in call.mesh.axis_names if axis in axes)
    sending = _sending(typed, compared)
    lines = [f"  {e.name}  # {e.site}" for e in sending] or [f"  {_reason(error)}"]
    lines = list(dict.fromkeys(lines))[:_SHOWN]
    try:
        alone = frozenset(call.mesh.axis_names) - compared
        comparison = _compare(call, proven, alone, axes, typed, repair=repair)
    except RefutedError as refuted:
        if refuted.lookup is not None:
            error.args = (_UNOWNED.format(call.name, over, refuted, refuted.lookup),)
        elif not _refuted(error, f"{refuted}", typed, over, others, sending):
            only = {e.name.partition("(")[0] for e in sending}
            text = _REFUTED + (SENT if only == {"broadcast"} else _BLOCKS)
            error.args = (text.format(call.name, over, refuted, "\n".join(lines)),)
        return None
    except _UncheckedError:  # which is what the error is about
        return None
    except UntriedError as untried:
        _note(error, f"Nor can it be tried with numbers over {over}: {untried}.")
        return None
    averages = proven.traits.averages or comparison.averages
    return replace(
        proven,
        traits=replace(proven.traits, averages=averages),
        tried="\n".join([comparison.report(over, call), *lines]),
    )


def _refuted(
    error: ShardTypeError,
    refuted: str,
    typed: Verdict,
    over: str,
    others: Mapping[str, Exception],
    sending: Sequence[Equation],
) -> bool:
    """Adds to an error about a step what numbers refute; returns whether it says more than they."""
    rejection_of(error).refuted = refuted
    is_elsewhere = any(advice in f"{error}" for advice in (PARTS, PER_RANK, _PICKED))
    if is_elsewhere or "times as much" in refuted:
        propose(error, other_ops(typed.traits.reductions, ["sum", "mean"]), first=True)
    sent = {axis for e in sending if e.collective for axis in e.collective.axes}
    plain = [axis for axis in others if axis not in sent]
    for axis in plain if sending else ():
        _note(error, f"Over {axis!r} alone: {_reason(others[axis])}")
    if plain or not sending:  # the step that is another one says more
        # But for one that a right program may have as well.
        if is_elsewhere:
            error.args = (f"{error}".replace(f"\nFix: {PER_RANK}", ""),)
            look = "" if _PICKED in f"{error}" else _LOOK["\nFix: " in f"{error}"]
            _note(error, f"{_ELSEWHERE_WRONG.format(over, refuted)}{look}")
        return True
    # Nor does it tell of the step that is wrong if right programs that send have it as well.
    if not any(advice in f"{error}" for advice in ("local_region", PARTS)):
        _note(error, f"Tried with numbers over {over} as well: {refuted}.")
        return True
    rejection_of(error).proposals, rejection_of(error).inputs = tuple(_turned(sending)), ()
    return False


def _turned(sending: Sequence[Equation]) -> Iterator[Repair]:
    """Yields the other direction for each call that sends to the same ranks whenever it runs."""
    calls: dict[Spot, set[Collective]] = {}
    for each in sending:
        if each.spot is not None and each.collective is not None and each.collective.perm:
            calls.setdefault(each.spot, set()).add(each.collective)
    for spot, made in calls.items():
        collective = made.pop()
        if not made and collective.transpose.perm != collective.perm:
            offset = min((s - t for s, t in collective.perm), key=abs)
            how = f"offset {offset}" if spot.name == "shift" else "each pair turned round"
            yield Repair(f"{how} in {spot}", turned=frozenset({spot}))


def _split(
    call: Call, compared: Axes, asks: Axes, repair: Repair
) -> tuple[Axes, Verdict | None, Mapping[str, Exception]]:
    """Returns the axes over which layouts prove nothing, a proof over the others, and errors.

    Along axes in `asks` the body asks for its rank, or a region promises what layouts believe.
    """
    errors: dict[str, Exception] = {}
    proofs: dict[Axes, Verdict] = {}
    for axis in sorted(compared) if len(compared) > 1 else ():
        try:
            proofs[frozenset({axis})] = attempt(call, repair, frozenset({axis}))
        except Exception as error:  # of the user's code too, on one device
            errors[axis] = error
    axes = (frozenset(errors) | asks) & compared or compared
    proven = proofs.get(compared - axes) or _proven(call, compared - axes, repair)
    if proven is None and axes != compared:  # the axes depend on one another
        axes, proven = compared, _proven(call, Axes(), repair)
    return axes, proven, errors


def _proven(call: Call, axes: Axes, repair: Repair) -> Verdict | None:
    try:
        return (
            attempt(call, repair, axes or "local") if repair.text else verify(call, axes or "local")
        )
    except Exception:  # of the user's code too, behind the first error
        return None


def _reason(error: Exception) -> str:
    """Returns the first line of an error, without what it is about."""
    first = str(error).partition("\n")[0]
    return first.partition("check='global': ")[2] or first


def keep_promises(call: Call, strictness: Strictness, proven: Verdict) -> Verdict:
    """Tries what regions promise, on which the proof of a program rests.

    Over the axes that their types name, the program has to be that of one device by numbers too.
    Where numbers cannot decide, they are believed.

    Raises:
        ShardTypeError: the ranks compute something else.
    """
    promises, compared = proven.traits.promises, _compared(call.mesh, strictness)
    axes = frozenset(axis for _, named in promises for axis in named) & compared
    typed = _well_typed(call)
    if typed is None or all(call.mesh.shape[axis] == 1 for axis in axes):
        return proven
    over = ", ".join(repr(axis) for axis in call.mesh.axis_names if axis in axes)
    lines = [f"  {e.name}  # {e.site}" for e in typed.equations if (e.name in dict(promises))]
    lines = list(dict.fromkeys(lines))[:_SHOWN]
    try:
        others = frozenset(call.mesh.axis_names) - compared
        comparison = _compare(call, proven, others, axes, typed, proven.traits.drawn)
    except RefutedError as refuted:
        text = _BROKEN.format(call.name, over, refuted, "\n".join(lines))
        raise rejected(text, refuted=f"{refuted}") from None
    except _UncheckedError as error:
        return replace(proven, untried=f"the body fails there: {error.__cause__}")
    except UntriedError as untried:
        return replace(proven, untried=str(untried))
    return replace(proven, tried="\n".join([comparison.report(over, call), *lines]))


def confirm(call: Call, repair: Repair, found: Verdict | ShardTypeError) -> bool | None:
    """Returns whether a repaired call has the results and gradients of one device, by numbers.

    Layouts have accepted it with this verdict, or do not prove it. None if numbers cannot tell, and
    no Function of the user's makes up gradients.
    """
    repaired = with_specs(call, repair)
    if isinstance(found, ShardTypeError):
        return by_numbers(repaired, "global", found, repair) is not None
    accepted = found
    axes, drawn = frozenset(call.mesh.axis_names), accepted.traits.drawn
    try:
        _compare(repaired, accepted, Axes(), axes, accepted, drawn, repair)
    except RefutedError:
        return False
    except (_UncheckedError, UntriedError):
        return False if accepted.traits.applies_functions else None
    return True


_BROKEN: Final = (
    "{}: check='global': tried with numbers over {}, a region is not what it promises: {}.\n"
    "The program rests on:\n{}\nFix: where its axes have one rank it must compute what all ranks "
    "compute together; validate_rule tries it by itself. If its arguments are no free choice, as a "
    "sequence that is permuted before it is sharded, say trusted=True, which explain lists."
)

_REFUTED: Final = (
    "{}: check='global': tried with numbers over {}, it is another program than on one device: {}."
    "\nOne device has no step for:\n{}\nFix: "
)
_BLOCKS: Final = (
    "where an axis has one rank, the body must compute the same: compare which block each rank has "
    "after each step, and what it does with it."
)


_ELSEWHERE_WRONG: Final = (
    "Tried with numbers over {} as well, which accept such a step where all else is right: {}."
)
_LOOK: Final = tuple(
    f" {what} differs, as how parts are weighed and summed."
    for what in ("Look for what else", "If that is not it, look for what else")
)
_UNOWNED: Final = (
    "{}: check='global': tried with numbers over {}, rows of ids are added up that ranks do not "
    "have: {}. With zeros in place of these rows it is as on one device.\n  at {}\nFix: zero them "
    "before they are summed, as torch.where(owned.unsqueeze(-1), rows, 0.0), where owned is "
    "(ids >= first) & (ids < first + n) for a rank's n rows from `first` on; or look ids up by "
    "nn.vocab_parallel_embedding."
)
_PICKED: Final = PICKED[0].partition("{")[0]


def _note(error: ShardTypeError, line: str) -> None:
    error.args = (f"{error}\n{line}",)


class _UncheckedError(Exception):
    """The body fails where some axes have one rank."""


def _compared(mesh: Mesh, strictness: Strictness) -> Axes:
    """Returns the axes over which strictness is global."""
    if isinstance(strictness, str):
        return frozenset(mesh.axis_names if strictness == "global" else ())
    return frozenset(mesh.finest(sorted(strictness)))


def _sending(typed: Verdict, compared: Axes) -> list[Equation]:
    """Returns the collectives over compared axes that one device does not have.

    Those whose blocks are one more dim count only where there are no others.
    """
    sending, stacking = [], []
    for equation in typed.equations:
        found = equation.collective
        if found is not None and not equation.backward and not compared.isdisjoint(found.axes):
            sizes = {*(found.sizes or ()), *(found.concat_sizes or ())}
            sending += [equation] * (found.movement.numbered or len(sizes) > 1)
            stacking += [equation] * (not found.tiled)
    return sending or stacking


def _well_typed(call: Call, repair: Repair = NONE) -> Verdict | None:
    """Returns a local verdict, also on a step whose results are not differentiated."""
    for leaves in (call.leaves, detached(call)):
        try:
            return attempt(replace(call, leaves=leaves), repair, "local")
        except Exception:  # of the user's code too; what is shown is the first error
            continue
    return None


def _compare(
    call: Call,
    proven: Verdict,
    others: Axes,
    axes: Axes,
    typed: Verdict,
    drawn: Drawn = (),
    repair: Repair = NONE,
) -> Comparison:
    """Tries the program with ranks along `axes`, and along `others`, which are not compared.

    With a repair, what it makes of the program. What it draws has been proven to be sharded as
    `drawn` says.

    Raises:
        RefutedError: it does not compute what it does where `axes` have one rank.
        UntriedError: random numbers cannot decide about it.
    """
    state = thread_state()
    likes = {at: _like(call.leaves[at], proven) for at in call.crossing}

    def compare(counts: Sequence[int]) -> Comparison:
        with state.entered():
            ranks, one = _small_enough(call, likes, others, axes, typed, counts, repair)
            _require_same_casts(proven, ranks.verdict, axes)
            known = () if others else drawn  # of axes that are not compared layouts say nothing
            comparison = Comparison(replace(ranks, drawn=known), replace(one, drawn=known))
            try:
                comparison.run()
            except RefutedError as refuted:
                sizes = comparison.sizes(call)
                refuted.args = (f"{refuted}, {sizes}" if sizes else f"{refuted}",)
                raise
            except RuntimeError as error:  # of torch, as where it lacks a derivative
                raise UntriedError(f"it fails with {_reason(error)!r}") from error
        return comparison

    for counts in COUNTS:
        comparison = _aside(partial(compare, counts))
        sizes = comparison.ranks.call.mesh.shape
        if all(sizes[axis] == call.mesh.shape[axis] for axis in axes | others):
            break
    return comparison


def _small_enough(
    call: Call,
    likes: Likes,
    others: Axes,
    axes: Axes,
    typed: Verdict,
    counts: Sequence[int],
    repair: Repair,
) -> tuple[Program, Program]:
    """Returns the program on ranks along `axes` and `others`, and along `others` alone.

    Along axes of many ranks on as many as `counts` says.

    Raises:
        UntriedError: it is too large, or does something else at smaller sizes.
    """
    too_large = f"there are {call.mesh.size} ranks"
    for scale in scales(call.mesh, axes | others, counts):
        scaled = {
            at: replace(like, shape=scale.shape(like.shape, typed.specs[at], call.mesh))
            for at, like in likes.items()
        }
        is_whole = scale.is_whole(call.mesh, axes | others) and scaled == likes
        try:
            ranks = _program(call, scaled, scale.of(axes | others), repair)
            one = _program(call, scaled, scale.of(others), repair)
        except _UncheckedError:
            if is_whole:
                raise
            break
        if not is_whole and _steps(ranks.verdict) != _steps(typed):
            break
        if not is_whole and counts is COUNTS[0]:
            _require_same_places(typed, ranks.verdict, too_large)
        work = max(ranks.work, one.work)
        if work <= _WORK:
            ratio = ranks.call.mesh.size // one.call.mesh.size
            return replace(ranks, is_whole=is_whole), replace(one, parts=ratio)
        too_large = f"ranks would compute {work:,} entries"
    raise UntriedError(_LARGE.format(too_large, MAX_RANKS, _WORK))


_ELSEWHERE: Final = "{}, and at smaller sizes {} sends to other places, at {}"


def _require_same_places(typed: Verdict, few: Verdict, why: str) -> None:
    """Requires that ranks send as far on a smaller mesh as they do in the call.

    Three in a row are compared, or two at an end: where the call has others, as between nodes, a
    trial on the smaller mesh does not show what happens there.
    """
    for here, there in zip(typed.equations, few.equations, strict=True):
        is_sent = here.collective is not None and here.collective.perm
        if is_sent and not _sent(here, typed.mesh) <= _sent(there, few.mesh):
            raise UntriedError(_ELSEWHERE.format(why, here.name, here.site))


def _sent(equation: Equation, mesh: Mesh) -> set[tuple[object, ...]]:
    assert equation.collective is not None  # it sends
    size, targets = mesh.num_ranks(equation.collective.axes), dict(equation.collective.perm)
    half = size // 2
    far = [(targets[at] - at + half) % size - half if at in targets else None for at in range(size)]
    row = ["the start", *far, "the end"]
    return set(zip(row, row[1:], row[2:], strict=False))


def _steps(verdict: Verdict) -> list[tuple[object, ...]]:
    """Returns what a program does, whatever its sizes are, and where it takes all of a dim."""
    return [(e.name, e.site, e.backward, *_whole(e)) for e in verdict.equations]


def _whole(equation: Equation) -> Iterator[bool]:
    if equation.name in _PARTS:
        for before, after in zip(equation.operands[:1], equation.results[:1], strict=True):
            yield from map(eq, before.shape, after.shape)


_PARTS: Final = frozenset(("slice", "split", "split_with_sizes", "constant_pad_nd", "topk"))
"""Operations of which a number says how much of a dim they take, or add."""


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


def _program(call: Call, likes: Likes, sizes: Mapping[str, int], repair: Repair) -> Program:
    """Checks the call where axes have these sizes."""
    full = call.mesh
    shape = tuple([sizes.get(axis, 1) for axis in full.axis_names])
    mesh = Mesh(
        *(full.axis_names, shape, "simulated", full.device, "ranks"),
        aliases=full.aliases,
        full=full,
    )
    leaves = list(call.leaves)
    for at, like in likes.items():
        [leaves[at]] = stand_ins((ShapeDtype(tuple(like.shape), like.dtype, like.grad),))
    there = replace(call, mesh=mesh, leaves=leaves, out_matches=Memo())
    try:
        verdict = attempt(there, repair, "local", observe=ProgramRecorder)
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

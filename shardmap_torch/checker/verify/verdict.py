"""The verdict on a call: all paths through its body, merged, and repairs if one is rejected."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.guards.monitor import CheckedStep, End, RunMonitor
from shardmap_torch.checker.ir.own_functions import communicating, keep_scope
from shardmap_torch.checker.ir.paths import AgainError, every_path, format_branches
from shardmap_torch.checker.ir.program import (
    Cast,
    Crossing,
    Equation,
    PathOutcome,
    ProgramPath,
    Resolved,
    Traits,
    Where,
)
from shardmap_torch.checker.ir.repairs import (
    NONE,
    Repair,
    rejection_of,
    shortened,
)
from shardmap_torch.checker.ir.sizes import EXACT, Sizes
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.verify.path import verify_path
from shardmap_torch.checker.verify.repairing import (
    Confirm,
    find_repair,
    note_spec,
    proven_alone,
    replicated,
)
from shardmap_torch.checker.verify.request import Observe, Reading, Request, Strictness
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.errors import CollectiveError, LayerError, ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.report.page import Page, Shown, Table
from shardmap_torch.spec import P
from shardmap_torch.types import I, K, R


def resolve(call: Call, outcomes: Sequence[PathOutcome]) -> Resolved:
    """Finds the choices that are right for every path.

    Raises:
        ShardTypeError: two paths need different choices; names both.
    """
    returning = [outcome for outcome in outcomes if outcome.result is not None]
    for outcome in returning[1:]:
        shown = [_describe(each) for each in (returning[0], outcome)]
        if shown[0] != shown[1]:
            raise _conflict(call, "return different results", [returning[0], outcome], shown)
    replicate = {
        where
        for outcome in outcomes
        for where, need in outcome.needs.items()
        if _is_replicate(call, returning, where)
    }
    exits = {where: _common(call, returning, where) for where in returning[0].exits}
    return Resolved(frozenset(replicate), exits)


def differs(outcome: PathOutcome, resolved: Resolved) -> bool:
    """Returns whether a path was verified with other choices than those that all paths share."""
    if outcome.result is None:
        return False
    own = {where for where, need in outcome.needs.items() if need.replicate}
    return own != resolved.replicate or any(
        outcome.exits[where].casts != casts for where, casts in resolved.exits.items()
    )


def with_replicate(call: Call, where: frozenset[Where]) -> Match:
    """Returns the match of the arguments with these axes named in `replicate=`."""
    specs = list(call.match.specs)
    for position, axis in where:
        specs[position] = replicated(specs[position], axis)
    return Match(call.match.paths, tuple(specs), call.match.crossing)


def _describe(outcome: PathOutcome) -> str:
    assert outcome.result is not None  # the caller has those that return
    match, words = outcome.result.match, []
    for position, path in enumerate(match.paths):
        shape, dtype, _ = outcome.outputs.get(position, ((), None, ()))
        what = "a Python value" if dtype is None else str(dtype).removeprefix("torch.")
        words.append(f"{path}: {what}" + (str(list(shape)) if dtype is not None else ""))
    return ", ".join(words) or "nothing"


def _is_replicate(call: Call, outcomes: Sequence[PathOutcome], where: Where) -> bool:
    needs = [(outcome, outcome.needs[where]) for outcome in outcomes if where in outcome.needs]
    first = needs[0]
    other = next((each for each in needs if each[1].replicate != first[1].replicate), None)
    if other is None:
        return first[1].replicate
    position, axis = where
    words = {
        True: "a sum over the ranks, as from replicate=, of the gradient from",
        False: "no sum, as from invariant=, of the gradient from",
    }
    raise _conflict(
        call,
        f"need different types of input {call.match.paths[position]} over {axis!r}",
        [first[0], other[0]],
        [f"{words[need.replicate]} {need.origin}" for _, need in (first, other)],
    )


def _common(call: Call, outcomes: Sequence[PathOutcome], where: Where) -> tuple[Cast, ...]:
    exits = [outcome.exits[where] for outcome in outcomes]
    for candidate in exits:
        if all(candidate.casts == e.casts or candidate.casts in e.others for e in exits):
            return candidate.casts
    other = next(i for i, each in enumerate(exits) if each.casts != exits[0].casts)
    position, axis = where
    result = outcomes[0].result
    assert result is not None  # these return
    raise _conflict(
        call,
        f"return {result.match.paths[position]} with types over {axis!r} that need different "
        "conversions",
        [outcomes[0], outcomes[other]],
        [f"{_named(exits[i].casts)} of {exits[i].origin}" for i in (0, other)],
    )


def _named(casts: Sequence[Cast]) -> str:
    words = [f"{name}({src} -> {dst})" for name, src, dst in casts]
    return " and ".join(words) or "as it is, the value"


def _conflict(
    call: Call, what: str, outcomes: Sequence[PathOutcome], lines: Sequence[str]
) -> ShardTypeError:
    text = [f"{call.name}: the paths through the body {what}:"]
    for line, outcome in zip(lines, outcomes, strict=True):
        text += [f"  {line}", *(f"  {each}" for each in format_branches(outcome.program.branches))]
    text.append("Fix: give them one type before they leave the branch, or use torch.where.")
    return ShardTypeError("\n".join(text))


Casts = tuple[Collective, ...]


@dataclass(frozen=True, repr=False)
class Verdict(Shown):
    """The checker's verdict on one signature of a call.

    Attributes:
        name: the name of the function.
        mesh: the mesh it is checked for.
        paths: the path of every argument leaf, by the caller's names.
        specs: the spec of every argument leaf, with no axis left open.
        crossing: positions of the leaves that cross the boundary.
        exits: for positions of results, the conversions that give them the type which their spec
            promises.
        outputs: shape, dtype and types of each result that crosses, after the conversions.
        make_paths: makes `program_paths`.
        result: what the body returned, its tensors without data.
        traits: what else runs have to know of the body.
        sharing: the input whose memory a result may have, by their positions.
        start: the notes of what the body asks of its mesh, with which each run is compared.
        altered: places, among what the body refers to, of what it changes.
        closed_over: places, among the tensors that the body refers to, of those that it reads.
        elsewhere: what tells the values of others that it reads, as arrays of NumPy.
        refusal: why results cannot be differentiated, where the body is right without that.
        tried: how it was compared with one device by numbers, where its steps cannot be.
        untried: why numbers cannot tell what regions promise, which is believed.
        observers: of its paths, as who has asked for the check makes them.
    """

    name: str
    mesh: Mesh
    paths: tuple[str, ...]
    specs: tuple[P | None, ...]
    crossing: tuple[int, ...]
    exits: Mapping[int, Casts]
    outputs: dict[int, tuple[tuple[int, ...], torch.dtype, Types]]
    make_paths: Callable[[], tuple[ProgramPath, ...]]
    result: Result
    traits: Traits
    sharing: dict[int, int]
    start: CheckedStep
    refusal: ShardTypeError | None = None
    altered: tuple[int, ...] = ()
    closed_over: tuple[int, ...] = ()
    elsewhere: tuple[str, ...] = ()
    tried: str = ""
    untried: str = ""
    observers: tuple[Any, ...] = ()

    def __repr__(self) -> str:
        """Says what was accepted; `trace` and `explain` say more."""
        return f"<Verdict: {self.name} on the {self.mesh} is accepted>"

    def page(self) -> Page:
        """Returns a page of its arguments; `trace` and `explain` have those of the program."""
        rows = [(path, repr(self.specs[at])) for at, path in enumerate(self.paths)]
        table = Table("Arguments, with every axis typed", ("argument", "spec"), rows)
        return Page(f"{self.name} on the {self.mesh} is accepted", tables=[table])

    @lazy
    def program_paths(self) -> tuple[ProgramPath, ...]:
        """The typed program, forward and backward.

        Several paths where the body branches on numbers taken from tensors.
        """
        return self.make_paths()

    @property
    def equations(self) -> tuple[Equation, ...]:
        """The equations of all paths, one path after the other."""
        return tuple(equation for path in self.program_paths for equation in path.equations)

    def apply(self, call: Call, late: End, monitor: Callable[..., RunMonitor] = RunMonitor) -> Call:
        """Returns the same call with every axis typed, and with results converted as promised.

        Its runs are compared with the checked program; `late` is called if a backward differs.
        """
        leaves = call.leaves if self.refusal is None else detached(call)
        follow = partial(monitor, self.start, late)
        return call.checked(
            leaves=leaves,
            match=self.match,
            exits=self.exits,
            follow=follow,
            draws=self.traits.draws,
            rank_only=self.traits.rank_only,
        )

    @property
    def batches(self) -> bool:
        """True if a batched body can run it."""
        return self.traits.rank_only is None

    @lazy
    def match(self) -> Match:
        """Returns the match of the arguments, with every axis typed."""
        return Match(self.paths, self.specs, self.crossing)


Otherwise = Callable[[Call, Strictness, ShardTypeError], Verdict | None]
"""Returns a verdict that is found in another way, where an error is not the last word."""


def verify(
    call: Call,
    strictness: Strictness,
    otherwise: Otherwise | None = None,
    confirm: Confirm | None = proven_alone,
) -> Verdict:
    """Interprets the body on fakes and its derived backward.

    With strictness "global" the forward must also be that of the same program on one device.
    Where it is not, step by step, `otherwise` is asked before a repair is searched; none is without
    `confirm`.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
    """
    try:
        return attempt(call, NONE, strictness)
    except CollectiveError as error:
        function = communicating(error)
        if function is None or not keep_scope(function):
            raise
        return verify(call, strictness, otherwise, confirm)
    except ShardTypeError as error:
        return _verify_otherwise(call, strictness, error, otherwise, confirm)
    except (IndexError, RuntimeError, ValueError, LayerError) as error:  # as about shapes
        if confirm is not None:
            note_spec(call, error, strictness, attempt, confirm)
        raise


def _verify_otherwise(
    call: Call,
    strictness: Strictness,
    error: ShardTypeError,
    otherwise: Otherwise | None,
    confirm: Confirm | None,
) -> Verdict:
    """Returns a verdict for which the error of the program as it is does not matter.

    Raises:
        ShardTypeError: the error, if there is none.
    """
    # 1. A closed-over tensor whose gradient is to be summed: the caller makes it an argument.
    closure = rejection_of(error).closure
    if closure is not None and call.lifts(closure):
        raise error
    # 2. What differs step by step from one device may be equal to it by numbers; and whether equal
    # gradients of ranks are addends, as the n-th part of a constant is, only one device tells.
    verdict = None if otherwise is None else otherwise(call, strictness, error)
    if strictness == "local" and rejection_of(error).may_be_addend:
        with suppress(Exception):  # of the user's code too; the first error is shown
            verdict = attempt(call, NONE, "global")
    if verdict is not None:
        return verdict
    # 3. A step that takes gradients by itself is right if nobody differentiates its results; who
    # does so later gets the error.
    step = _as_step(call, strictness)
    # 4. The error is printed with a repair. With that, results of a step need no gradient either.
    takes_gradients = rejection_of(error).takes_gradients and not _is_transformed()
    is_step = step is None and takes_gradients
    tried_on = replace(call, leaves=detached(call)) if is_step else call
    if confirm is not None:
        error = find_repair(tried_on, error, strictness, attempt, confirm)
    refusal = shortened(error)
    if step is None:
        raise refusal from None
    return replace(step, refusal=refusal)


def _as_step(call: Call, strictness: Strictness) -> Verdict | None:
    """The verdict on a step that takes gradients by itself, whose results are not differentiated.

    None where it is not one, or is wrong; or where a transform around the call differentiates it.
    """
    leaves = [call.leaves[position] for position in call.crossing]
    if _is_transformed() or not any(map(can_receive_gradient, leaves)):
        return None
    try:
        verdict = attempt(replace(call, leaves=detached(call)), NONE, strictness)
    except Exception:  # the first attempt has the error to show
        return None
    return verdict if verdict.traits.takes_gradients else None


def _is_transformed() -> bool:
    """Returns whether a transform of torch.func goes on around the call."""
    return functorch.peek_interpreter_stack() is not None


def detached(call: Call) -> list[Any]:
    """The leaves of the arguments, those that cross without a gradient."""
    leaves = list(call.leaves)
    for position in call.crossing:
        leaves[position] = leaves[position].detach()
    return leaves


def attempt(
    call: Call,
    repair: Repair,
    strictness: Strictness,
    sizes: Sizes = EXACT,
    observe: Observe | None = None,
) -> Verdict:
    """Checks a call by one reading after the other of what the program leaves open.

    `observe` makes observers of paths that nothing compares with one device.

    Raises:
        ShardTypeError: it is well-typed by none.
    """
    reading: Reading | None = Reading()
    failures: list[tuple[Reading, ShardTypeError]] = []
    try:
        while reading is not None:
            shared, casts = reading.resolved.replicate, reading.casts(strictness)
            own = replace(call, match=with_replicate(call, shared)) if shared else call
            request = Request(own, repair, strictness, sizes, reading, casts, observe=observe)
            try:
                found = _verify_paths(request)
            except (Exception, AgainError) as error:  # the user's code may raise anything
                following = _next(request, error)
                if isinstance(error, ShardTypeError):
                    failures.append((reading, error))
                elif following is None:
                    raise
                reading = following
            else:
                if isinstance(found, Verdict):
                    return found
                reading = found
        raise _shown(failures) from None
    finally:
        failures.clear()  # they refer to this frame, which refers to them


def _verify_paths(request: Request) -> Verdict | Reading:
    """Verifies all paths; returns a reading with choices that they share, if some had others."""
    call, reading = request.call, request.reading
    outcomes = every_path(call.name, partial(verify_path, request))
    if all(outcome.result is None for outcome in outcomes):
        assert outcomes[0].error is not None  # it has no result
        raise outcomes[0].error
    resolved = resolve(call, outcomes)
    if not any(differs(outcome, resolved) for outcome in outcomes):
        return _verdict(request, resolved, outcomes)
    if reading.rounds == _ROUNDS:
        raise ShardTypeError(
            f"{call.name}: no types of the inputs and results were found that suit all paths "
            "through the body.\nFix: name the axes of inputs in replicate= or invariant=, or use "
            "torch.where."
        )
    return replace(reading, resolved=resolved, rounds=reading.rounds + 1)


_ROUNDS: Final = 3
"""Maximal number of rounds over the paths with choices that they share: those of one are the next
one's."""


def _next(request: Request, error: BaseException) -> Reading | None:
    """Returns the reading to try after one by which a program is not well-typed, if one is left.

    Only what has mattered in the failure is read otherwise, the cheapest first.
    """
    reading, met, casts = request.reading, request.met, request.casts
    # 1. The body takes a rank's part of a tuple: what torch returns is marked.
    if isinstance(error, AgainError):
        return replace(reading, marks_parts=True)
    is_typed = isinstance(error, ShardTypeError)
    if not (is_typed or (met.assumed and reading.assumes)):
        return None
    anew = replace(reading, resolved=Resolved(), rounds=0)
    # 2. A result that is K has been returned as I, and its gradients do not fit: as R.
    if met.results and reading.results == K:
        return replace(anew, results=R)
    # 3. One-device gradients that are assumed stand for a backward that nothing has looked at. To
    # interpret it costs as much as the ranks' own, but what is assumed may be what is wrong.
    if met.assumed and reading.assumes:
        return replace(anew, results=K, assumes=False)
    # 4. Equal results of `lax` that meet what varies are cast by JAX where they meet, a call at a
    # time: of those calls that the error is about.
    makers = rejection_of(error).equal if isinstance(error, ShardTypeError) else ()
    cast = reading.cast | {casts.results[made] for made in makers if made in casts.results}
    if cast != reading.cast:
        return replace(anew, cast=cast, results=K, assumes=True)
    # 5. JAX sums the gradient of what it casts. Where that does not type, it stays a pending sum.
    if casts.asked and reading.uncommitted == I:
        return replace(anew, cast=frozenset(), results=K, assumes=True, uncommitted=R)
    return None


def _shown(failures: Sequence[tuple[Reading, ShardTypeError]]) -> ShardTypeError:
    """Returns the error to show where a program is well-typed by no reading.

    That is by JAX's reading, results as I, and gradients that were computed, if they were. Of
    errors before and after a cast of `lax` it is the last, unless that is about R: nobody has
    written the cast that makes R.
    """
    own = [(by, error) for by, error in failures if (by.results, by.uncommitted) == (K, I)]
    computed = {by.cast for by, _ in own if not by.assumes}
    first, *later = [error for by, error in own if not (by.assumes and by.cast in computed)]
    return next((each for each in reversed(later) if R not in rejection_of(each).types), first)


def _verdict(request: Request, resolved: Resolved, outcomes: Sequence[PathOutcome]) -> Verdict:
    call = request.call
    first = next(outcome for outcome in outcomes if outcome.result is not None)
    assert first.result is not None  # by the filter
    return Verdict(
        call.name,
        call.mesh.layout or call.mesh,
        call.match.paths,
        _closed_specs(call, resolved.replicate),
        call.crossing,
        Crossing({where: casts for where, casts in resolved.exits.items() if casts}).collectives,
        first.outputs,
        partial(tuple, [outcome.program for outcome in outcomes]),
        first.result,
        Traits.of_all([outcome.traits for outcome in outcomes]),
        {at: source for outcome in outcomes for at, source in outcome.sharing.items()},
        request.start,
        observers=tuple([outcome.observer for outcome in outcomes]),
    )


def _closed_specs(call: Call, replicate: frozenset[Where]) -> tuple[P | None, ...]:
    """The specs with every open axis named."""
    specs = list(with_replicate(call, replicate).specs)
    for position in call.crossing:
        spec = specs[position]
        assert spec is not None  # it crosses
        open_axes = set(call.mapped) - spec.named
        specs[position] = P(
            *spec.entries,
            replicate=spec.replicate,
            invariant=spec.invariant | open_axes,
            partial=spec.partial,
        )
    return tuple(specs)

"""The verdict on a call: all paths through its body, and repairs if one is rejected."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import torch

from shardmap_torch.boundary.call import Call, Result
from shardmap_torch.boundary.matching import Match
from shardmap_torch.checker.guards.monitor import CheckedStep, End, RunMonitor
from shardmap_torch.checker.guards.places import Kept
from shardmap_torch.checker.ir.outcomes import Crossing, PathOutcome, Resolved, Traits, Where
from shardmap_torch.checker.ir.own_functions import communicating
from shardmap_torch.checker.ir.paths import every_path
from shardmap_torch.checker.ir.program import Equation, ProgramPath
from shardmap_torch.checker.ir.rank_only import keep_scope
from shardmap_torch.checker.ir.repairs import (
    NONE,
    Repair,
    is_about,
    is_of_step,
    makers_of_equal,
    shortened,
    with_tried,
)
from shardmap_torch.checker.ir.sizes import EXACT, Sizes
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.verify.merge import differs, resolve, with_replicate
from shardmap_torch.checker.verify.path import Request, Strictness, verify_path
from shardmap_torch.checker.verify.search import search
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Readings
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.closures import closure_of
from shardmap_torch.core.functorch import can_receive_gradient
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.errors import CollectiveError, ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import I, R, V

Casts = tuple[Collective, ...]


@dataclass(frozen=True, repr=False)
class Verdict:
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
        altered: what the body refers to and changes, with the values that it starts from.
        refusal: why results cannot be differentiated, where the body is right without that.
        tried: how it was compared with one device by numbers, where its steps cannot be.
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
    altered: tuple[Kept, ...] = ()
    tried: str = ""

    def __repr__(self) -> str:
        """Says what was accepted; `trace` and `explain` say more."""
        return f"<Verdict: {self.name} on the {self.mesh} is accepted>"

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

    def apply(self, call: Call, late: End) -> Call:
        """Returns the same call with every axis typed, and with results converted as promised.

        Its runs are compared with the checked program; `late` is called if a backward differs.
        """
        leaves = call.leaves if self.refusal is None else detached(call)
        follow = partial(RunMonitor, self.start, late)
        draws, rank_only = self.traits.draws, self.traits.rank_only
        return call.checked(leaves, self.match, self.exits, follow, draws, rank_only)

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


def verify(call: Call, strictness: Strictness, otherwise: Otherwise | None = None) -> Verdict:
    """Interprets the body on fakes and its derived backward.

    With strictness "global" the forward must also be that of the same program on one device.
    Where it is not, step by step, `otherwise` is asked before a repair is searched.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
    """
    try:
        return attempt(call, NONE, strictness)
    except CollectiveError as error:
        function = communicating(error)
        if function is None or not keep_scope(function):
            raise
        return verify(call, strictness, otherwise)
    except ShardTypeError as error:
        closure = closure_of(error)
        if closure is not None and call.lifts(closure):
            raise  # called again, with an argument in its place
        verdict = None if otherwise is None else otherwise(call, strictness, error)
        if verdict is not None:
            return verdict
        step = _as_step(call, strictness)
        is_step = step is None and is_of_step(error) and not _is_transformed()
        # With a repair, results of a step need no gradient either.
        tried_on = replace(call, leaves=detached(call)) if is_step else call
        refusal = shortened(with_tried(error, search(tried_on, error, strictness, attempt)))
        if step is None:
            raise refusal from None
        return replace(step, refusal=refusal)


def _as_step(call: Call, strictness: Strictness) -> Verdict | None:
    """The verdict on a step that takes gradients by itself, whose results are not differentiated.

    None where it is not one, or is wrong; or where a transform around the call differentiates it.
    """
    leaves = [call.leaves[position] for position in call.crossing]
    if _is_transformed():
        return None
    if not any(map(can_receive_gradient, leaves)):
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


def attempt(call: Call, repair: Repair, strictness: Strictness, sizes: Sizes = EXACT) -> Verdict:
    """Tries JAX's reading of its casts first, and then the one that leaves gradients unsummed."""
    copies = V if strictness == "local" else R
    first, second = (
        Request(call, repair, strictness, readings=Readings(uncommitted, copies), sizes=sizes)
        for uncommitted in (I, R)
    )
    try:
        return _casting(first)
    except ShardTypeError as error:
        if not first.readings.asked:
            raise
        with suppress(ShardTypeError):
            return _casting(second)
        raise error from None


def _casting(request: Request) -> Verdict:
    """Casts equal results of `lax` where they meet what varies, as JAX does, a call at a time."""
    readings, first = request.readings, None
    while True:
        try:
            return _attempt_as(request)
        except ShardTypeError as error:
            if first is None or not is_about(error, R):  # a cast that nobody has written makes R
                first = error
            known, makers = readings.results, makers_of_equal(error)
            more = {known[maker] for maker in makers if maker in known}
            if more <= readings.cast:
                raise first from None
        readings.cast |= more
        readings.results.clear()
        request = replace(request, start=CheckedStep())


def _attempt_as(request: Request) -> Verdict:
    call = request.call
    for _ in range(_ROUNDS):
        outcomes = every_path(call.name, partial(verify_path, request))
        if all(outcome.result is None for outcome in outcomes):
            assert outcomes[0].error is not None  # it has no result
            raise outcomes[0].error
        resolved = resolve(request.call, outcomes)
        if not any(differs(outcome, resolved) for outcome in outcomes):
            return _verdict(request, resolved, outcomes)
        match = with_replicate(request.call, resolved.replicate)
        request = replace(
            request, call=replace(call, match=match), resolved=resolved, start=CheckedStep()
        )
    raise ShardTypeError(
        f"{call.name}: no types of the inputs and results were found that suit all paths through "
        "the body.\nFix: name the axes of inputs in replicate= or invariant=, or use torch.where."
    )


_ROUNDS: Final = 4
"""Maximal number of rounds over the paths with the choices they share."""


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

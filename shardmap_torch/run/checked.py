"""Checked: the verdicts of a function's signatures, and runs compared with the checked program.

A run that departs from its program is unwound before it sends anything different, checked again and
started again: bodies are pure, and on processes all ranks compare that they depart at the same
step, so that what they have sent matches. One new check suffices if something has changed since the
last one; a program that changes from run to run is an error.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final, NoReturn

import torch
from torch import Tensor
from torch.autograd import Function

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.monitor import (
    Departure,
    Difference,
    DryMonitor,
    ResizedMonitor,
    depart,
)
from shardmap_torch.checker.guards.state import CapturedState, Signature, State, signature
from shardmap_torch.checker.interpreter.interpreter import closed_over_outer
from shardmap_torch.checker.ir.repairs import NONE, Repair
from shardmap_torch.checker.ir.sizes import Sizes
from shardmap_torch.checker.sizes import History, values_of
from shardmap_torch.checker.verify.request import Strictness
from shardmap_torch.checker.verify.verdict import Verdict, attempt
from shardmap_torch.checker.verify.verdict import verify as verify_steps
from shardmap_torch.control.control import Control
from shardmap_torch.control.start import current
from shardmap_torch.core import autograd_state
from shardmap_torch.core.ambient import printing_once
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.functorch import can_receive_gradient, is_batched, is_smooth
from shardmap_torch.core.progress import telling
from shardmap_torch.core.torch_private.fake_modes import postponing_imports
from shardmap_torch.core.tree import Tree, entry_order, flatten, put, unflatten
from shardmap_torch.errors import CollectiveMismatchError, ShardMapError, ShardTypeError
from shardmap_torch.mesh import PROCESS_KINDS, Mesh
from shardmap_torch.run.agree import Description, agree, describe, posting_errors, refused
from shardmap_torch.run.compiled import UncompiledError
from shardmap_torch.run.donation import require_donatable, taking, versions_of
from shardmap_torch.run.recorded.recordings import Recordings, Replays, require_recordable
from shardmap_torch.run.recorded.schedule import Schedule
from shardmap_torch.run.runtimes import is_simulated
from shardmap_torch.run.safety.equal_values import EqualValues
from shardmap_torch.run.safety.full_collections import postponing_full_collections
from shardmap_torch.run.safety.one_device import OneDevice
from shardmap_torch.run.safety.own_state import own_state, undoing
from shardmap_torch.run.safety.retrace_warning import Changing, watch_remaking

Run = Callable[[Call], Tree]

_RUNS: Final = 2

_CHANGING: Final = (
    "the body does not do what it did when it was checked just before:",
    "It must do the same whenever it is called with the same arguments. Pass what it depends on as "
    "an argument.",
)
_LATE: Final = (
    "a backward does not do what it did when it was checked:",
    "What it depends on has changed since the forward. Pass it as an argument, or do not change it "
    "in between.",
)


def verify(call: Call, strictness: Strictness, repairs: bool = True) -> Verdict:
    """Checks a call step by step, or with numbers over axes of which one device has no such steps.

    An error has a repair that was tried, unless `repairs` is False.

    Raises:
        ShardTypeError: the program is not well-typed, or would compute wrong gradients.
    """
    if strictness == "local":
        return verify_steps(call, strictness, confirm=_confirm)
    from shardmap_torch.run.trials.by_numbers import by_numbers, keep_promises

    verdict = verify_steps(call, strictness, by_numbers, _confirm if repairs else None)
    is_open = verdict.traits.promises and not verdict.tried
    return keep_promises(call, strictness, verdict) if is_open else verdict


def _confirm(call: Call, repair: Repair, found: Verdict | ShardTypeError) -> bool | None:
    """Compares a repaired call with one device by numbers, what most programs need not import."""
    from shardmap_torch.run.trials.by_numbers import confirm

    return confirm(call, repair, found)


@contextmanager
def _taking_apart(states: Sequence[State]) -> Iterator[None]:
    """Takes no_grad for inference mode, where torch takes no composite operator apart.

    Not for code that asks which of them is on.
    """
    asks = any(state.mentions("is_inference_mode_enabled") for state in states)
    if asks or not torch.is_inference_mode_enabled():
        yield
        return
    with torch.inference_mode(False), torch.no_grad():
        yield


class Checked:
    """The checker's verdicts on one function, by signature.

    A call is looked up (`_find`) or checked (`_check`), agreed on by processes (`_agreed`), and run
    (`_run_once`); once more if a run departs from its program.
    """

    def __init__(
        self,
        name: str,
        function: Callable[..., Any],
        strictness: Strictness,
        debug: bool = False,
        replay: Schedule | None = None,
    ) -> None:
        """Starts without verdicts.

        With `debug` each call compares its plain inputs; with `replay` operators are recorded, and
        run in that order.
        """
        self._name, self._strictness = name, strictness
        self._captured = CapturedState(function)
        self._verdicts: Memo[_Known] = Memo()
        self._others: Memo[Verdict | ShardTypeError] = Memo()
        self._changing, self._calls = Changing(name), 0
        self._history = History()
        self._carried: int = getattr(function, "carried", 0)
        self._equal, self._replay = EqualValues(debug), replay
        self.one_device: OneDevice | None = None

    def verdict(self, call: Call, strictness: Strictness | None = None) -> Verdict:
        """Returns the verdict of a call's signature.

        Raises:
            ShardTypeError: the program is not well-typed, or would compute wrong gradients.
        """
        key = signature(call, self._captured)
        if strictness is None or strictness == self._strictness:
            return self._find(key, call).verdict
        found = self._others.get((strictness, key), lambda: self._otherwise(call, strictness))
        if isinstance(found, ShardTypeError):
            raise found.with_traceback(None)
        return found

    def _otherwise(self, call: Call, strictness: Strictness) -> Verdict | ShardTypeError:
        """Checks a call in another strictness than the function's; an error is remembered too."""
        try:
            return self._verify(call, partial(verify, strictness=strictness))
        except ShardTypeError as error:
            error.__context__ = None  # whose frames have all values of the check
            return error.with_traceback(None)

    def traced(self, call: Call) -> Verdict:
        """Returns the verdict of a call that is being compiled; all ranks compare what is new.

        Not more often, nor within a call that was compared: a rank may compile again what it has
        compiled, where others do not.

        Raises:
            ShardTypeError: as `verdict`.
            CollectiveMismatchError: the processes compile different programs.
        """
        key = signature(call, self._captured)
        known = self._verdicts.find(key)
        control, is_compared = current(), known is not None and known.description is not None
        if control is None or call.mesh.kind not in PROCESS_KINDS or control.in_call or is_compared:
            return self._find(key, call).verdict
        agreed = partial(self._agreed, key, call, control, None, True)
        return posting_errors(self._name, agreed, call.mesh).verdict

    def run(self, call: Call, run: Run, compiled: Callable[[], Tree] | None = None) -> Tree:
        """Runs a call as it was checked, and processes have compared it; `compiled` in its place.

        Raises:
            ShardTypeError: as `verdict`; or the body changes what it does from run to run.
            CollectiveMismatchError: the processes do not run the same program.
        """
        self._calls += 1
        key = signature(call, self._captured)
        if call.donated:
            require_donatable(call, self._captured.tensors(call))
        if call.mesh.kind not in PROCESS_KINDS:
            return self._run_checked(key, call, run, None)
        compared = partial(self._run_checked, key, call, run, compiled)
        try:
            return posting_errors(self._name, compared, call.mesh)
        except CollectiveMismatchError:
            self._forget(key, call)  # what a rank differs in may hide from the key, as in a file
            raise

    def _run_checked(
        self, key: Signature, call: Call, run: Run, compiled: Callable[[], Tree] | None
    ) -> Tree:
        control = current() if call.mesh.kind in PROCESS_KINDS else None
        departed: Difference | None = None
        versions = versions_of(call) if call.donated else []
        for _ in range(_RUNS):
            # Compiled code does not ask whether a comparison is over.
            known = self._agreed(key, call, control, departed, compiled is not None)
            try:
                if compiled is not None:
                    with suppress(UncompiledError):
                        return compiled()
                return self._run_once(call, known, run, replays=compiled is None)
            except Departure as departure:
                departed = departure.difference
                if call.donated and versions_of(call) != versions:
                    break  # what another run would find changed
            self._forget(key, call)
        assert departed is not None  # or a run would have returned
        self._stop(call, _CHANGING, departed)

    def _run_once(self, call: Call, known: "_Known", run: Run, replays: bool) -> Tree:
        """Runs a call; one that other ranks have compiled does not replay, as those do not.

        Raises:
            Departure: it does not do what its verdict is about.
        """
        verdict = known.verdict
        applied = verdict.apply(call, partial(self._stop, call, _LATE))
        if verdict.traits.averages:
            from shardmap_torch.run.safety.ignored_targets import counting_all

            applied = replace(applied, function=counting_all(call.name, call.function))
        if call.donated:
            applied = taking(applied)
        if self._replay and replays:
            applied = replace(applied, recordings=self._recordings(call, known))
        if verdict.altered and is_simulated(call.mesh):
            with own_state(applied, self._captured.states(call), verdict.altered) as apart:
                found = run(apart)
        else:
            found = run(applied)
        refusal = verdict.refusal
        return found if refusal is None else _differentiated_once(call, found, refusal)

    def without_data(self, call: Call, verdict: Verdict, resized: bool = False) -> Call:
        """Returns the call as it was checked, for a run without data.

        If `resized`, what was checked is a call of other sizes, and the run departs where it does
        something else.
        """
        if resized:
            return verdict.apply(call, depart, ResizedMonitor)
        stops = [partial(_stop_alone, call.name, why) for why in (_LATE, _CHANGING)]
        return verdict.apply(call, stops[0], partial(DryMonitor, end=stops[1]))

    def _recordings(self, call: Call, known: "_Known") -> Replays:
        """Returns what runs the recorded operators of a call."""
        if known.recordings is None:
            require_recordable(call, known.verdict)
            known.recordings = Recordings(self._name, self._replay or "program")
        static = [call.leaves[position] for position in call.match.static]
        tensors = self._captured.tensors(call)
        return Replays(known.recordings, tensors, entry_order(call.structure), static)

    def _forget(self, key: Signature, call: Call) -> None:
        self._verdicts.forget(key)
        self._others = Memo()
        self._history.forget(key, call)

    def refuse(self, mesh: Mesh, error: ShardMapError) -> NoReturn:
        """Raises the error of a call that cannot be checked, after comparing it on all processes.

        Raises:
            ShardMapError: the error, if all processes have one.
            CollectiveMismatchError: another process has none.
        """
        if mesh.kind in PROCESS_KINDS:
            posting_errors(self._name, lambda: agree(refused(self._name, error)), mesh)
        raise error

    def _find(self, key: Signature, call: Call) -> "_Known":
        known = self._verdicts.find(key)
        if known is not None:
            return known
        return self._verdicts.get(key, lambda: _Known(self._check(key, call)))

    def _check(self, key: Signature, call: Call) -> Verdict:
        """Returns the verdict on all sizes like those of a call, or else on these alone."""
        known = self._history.find(key, call)
        if known is not None:
            return known
        if self._calls <= 1:
            if call.mesh.kind != "abstract":  # where each call is of another mesh, as in best_mesh
                watch_remaking(self, self._name, call.function)
        # Each rank would have to run the body once for each item of the batch.
        arguments = set(map(id, call.leaves))
        hidden = (x for x in self._captured.tensors(call) if id(x) not in arguments)
        if any(map(is_batched, hidden)):
            raise closed_over_outer(self._name, "batches")
        exactly = partial(self._verify, call, partial(verify, strictness=self._strictness))
        derived = self._history.derive(key, call, self._derive, exactly)
        if derived is not None:
            return derived
        values, why = values_of(call, self._captured), self._history.why(key, call)
        self._changing.checked(self._calls, key, values, why)
        verdict = exactly()
        self._history.add(key, call, verdict)
        if self._carried:
            self._history.foresee(key, call, verdict, self._carried, self._derive)
        if self.one_device is not None:
            strictly = partial(verify, strictness="global", repairs=False)
            self.one_device.ask(call, lambda: self._verify(call, strictly))
        return verdict

    def _derive(self, call: Call, sizes: Sizes) -> Verdict:
        """Checks a call with symbols for its sizes, of a body that keeps none of them."""
        check = partial(attempt, repair=NONE, strictness=self._strictness, sizes=sizes)
        verdict = self._verify(call, check)
        if verdict.altered:
            raise ShardTypeError("the body changes what it refers to")
        if verdict.traits.promises and self._strictness != "local":
            raise ShardTypeError("promises are tried at each size")
        return verdict

    def _verify(self, call: Call, check: Callable[[Call], Verdict]) -> Verdict:
        """Checks a call, of whose interpretations nothing stays behind."""
        states = self._captured.states(call)
        # torch's checkpoint, around the call, would keep or recompute what the check computes, and
        # the cache of autocast has casts without data of what the body refers to.
        torch.clear_autocast_cache()
        aside, once = autograd_state.set_aside(), printing_once()
        with aside, postponing_full_collections(), postponing_imports(), once:
            with undoing(call, states, is_simulated(call.mesh)) as (undone_call, undone):
                with telling("checking", self._name), _taking_apart(states):
                    verdict = check(undone_call)
        torch.clear_autocast_cache()
        altered, read = tuple(sorted(undone.altered)), verdict.traits.closed_over
        known = {id(x): at for at, x in enumerate(self._captured.tensors(call))}
        places = tuple(sorted({known[each] for each, _ in read if each in known}))
        elsewhere = tuple(sorted([values for each, values in read if each not in known]))
        return replace(verdict, altered=altered, closed_over=places, elsewhere=elsewhere)

    def _agreed(
        self, key: Signature, call: Call, control: Control | None, departure: Any, now: bool
    ) -> "_Known":
        """Returns the verdict, after or while all processes compare their descriptions of it."""
        try:
            known = self._find(key, call)
        except Exception as error:
            if control is not None:  # simulated ranks concern no other process
                agree(refused(self._name, error, call), departure)
            raise
        if control is None:
            return known
        known.enter(control.era)
        now = now or known.description is None or departure is not None
        if known.description is None:
            with postponing_full_collections():
                known.description = describe(call, known.verdict)
        values, places = None, known.verdict.closed_over
        if departure is None:
            tensors = self._captured.tensors(call) if places else ()
            values = self._equal.of(call, control, [tensors[at] for at in places])
        agree(known.compared(), departure, now, values)
        return known

    def _stop(self, call: Call, why: tuple[str, str], difference: Difference) -> NoReturn:
        error = _changed(self._name, why, difference)
        if call.mesh.kind in PROCESS_KINDS:
            agree(refused(self._name, error), difference)
        raise error


def _stop_alone(name: str, why: tuple[str, str], difference: Difference) -> NoReturn:
    raise _changed(name, why, difference)


def _changed(name: str, why: tuple[str, str], difference: Difference) -> ShardTypeError:
    return ShardTypeError(f"{name}: {why[0]}\n{difference}\n{why[1]}")


@dataclass(eq=False)
class _Known:
    """A verdict, its recordings, and the description that processes compare, made when used."""

    verdict: Verdict
    description: Description | None = None
    recordings: Recordings | None = None
    num_orders: int = 0
    era: object = None

    def enter(self, era: object) -> None:
        """Forgets recordings of before an error, after which some ranks may have fewer of them."""
        if self.era is not era:
            self.era, self.recordings, self.description, self.num_orders = era, None, None, 0

    def compared(self) -> Description:
        """Returns the description, and with it the orders in which recordings run by now."""
        assert self.description is not None
        orders = [] if self.recordings is None else self.recordings.orders[self.num_orders :]
        for order in orders:
            self.num_orders += 1
            self.description = self.description.followed_by(order)
        return self.description


def _differentiated_once(call: Call, result: Tree, refusal: ShardTypeError) -> Tree:
    """Attaches results to the arguments, so that a backward through them raises `refusal`."""
    leaves, structure = flatten(result)
    anchor = next(x for x in (call.leaves[at] for at in call.crossing) if can_receive_gradient(x))
    places = [at for at, x in enumerate(leaves) if is_smooth(x)]
    if places:
        apply: Any = _DifferentiatedOnce.apply
        attached = apply(f"{refusal}", anchor, *(leaves[at] for at in places))
        leaves = put(leaves, places, attached)
    return unflatten(structure, leaves)


class _DifferentiatedOnce(Function):
    """The identity, whose backward is an error."""

    @staticmethod
    def forward(ctx: Any, why: str, anchor: Tensor, *values: Tensor) -> tuple[Tensor, ...]:
        ctx.why = why
        ctx.set_materialize_grads(False)
        return tuple(value.detach() for value in values)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        raise ShardTypeError(
            "a backward has come to the result of a step that takes gradients by itself, and that "
            f"cannot be differentiated again:\n{ctx.why}"
        )

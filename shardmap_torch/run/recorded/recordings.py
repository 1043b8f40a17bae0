"""Recordings: the recorded runs of one verdict, and when they may run in a body's place."""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from numbers import Number
from operator import is_
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.recorder import Looking, OperatorTape, RecordingBackend
from shardmap_torch.boundary.call import Call, Result, run_body
from shardmap_torch.checker.guards.state import PLAIN
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.torch_private.engine import (
    are_transforms_active,
    dispatch_mode_stack,
    forward_level,
    num_function_modes,
)
from shardmap_torch.core.tree import Tree, flatten, put, unflatten
from shardmap_torch.errors import TransformError
from shardmap_torch.run.agree import Description, agree
from shardmap_torch.run.recorded.schedule import Schedule, has_messages, order_of, overlapped
from shardmap_torch.run.recorded.simplify import simplify
from shardmap_torch.run.recorded.source import Runnable, runnable

Leaves: TypeAlias = tuple[Sequence[Any], Callable[[list[Any]], Any]]
"""Leaves of what a body returns, and what makes the result of such leaves."""

Record: TypeAlias = Callable[[OperatorTape, Sequence[Tensor]], Leaves]
"""Runs a body on other tensors than those of its call."""

_TENSOR: Final = object()
"""Stands where a result has a tensor."""

_PLAIN: Final = (Tensor, torch.nn.Parameter)

_MOST: Final = 64
"""Recordings that a verdict keeps, of other strides or switches of torch."""

_VALUES: Final = (*PLAIN, Number, Enum, type, range)
"""Types of results that later calls may return again: nothing in them changes."""

_DEVICES: Final = ("cpu", "cuda")
_CANNOT: Final = "{}: replay=True cannot record what was checked: {}. Leave replay=True out."
_TRACKED: Final = (
    "{}: replay=True records no graph for autograd, and results depend on a tensor that requires "
    "gradients and is no argument. Call it under torch.no_grad(), pass the tensor as an argument, "
    "or leave replay=True out."
)
_OBJECT: Final = (
    "{}: replay=True records operators, and the body returns an object of {}, which later calls "
    "would return again with what is in it now. Return its tensors and numbers, or leave "
    "replay=True out."
)


@dataclass(frozen=True, eq=False, slots=True)
class Recording:
    """A recorded run.

    Attributes:
        run: runs its operators.
        others: the leaves of the result, `_TENSOR` in the place of each tensor.
        finish: makes the result of its leaves.
        captured: tensors that the body's code refers to, which it has taken from there.
        order: of the entries of dicts among the arguments.
    """

    run: Runnable
    others: Sequence[Any]
    finish: Callable[[list[Any]], Any]
    captured: Sequence[Tensor]
    order: Any


class Recordings:
    """The recorded runs of one verdict, by what else operators depend on.

    Attributes:
        orders: for each run whose collectives have another order than the body's, that order.
    """

    def __init__(self, name: str, schedule: Schedule) -> None:
        self._name, self._schedule = name, schedule
        self._known: Memo[Recording] = Memo(_MOST)
        self.orders: list[list[str]] = []

    def run(
        self,
        captured: Sequence[Tensor],
        order: Any,
        static: Sequence[Any],
        rank: int | None,
        tensors: Sequence[Tensor],
        record: Record,
    ) -> Any:
        """Runs what is recorded, or the body, and records that.

        Args:
            captured: the tensors that the body's code refers to.
            order: of the entries of dicts among the arguments, to compare.
            static: the arguments that are no tensors.
            rank: of this process.
            tensors: those that cross into the body.
            record: runs the body.
        """
        key = (
            rank,
            switches(),
            torch.get_num_threads(),  # decides how sums of constants round
            *map(Tensor.stride, tensors),
            *[x.requires_grad for x in tensors],
            *map(type, tensors),
            _first_of_each(tensors),
            *map(Tensor.stride, captured),
        )
        known = self._known.find(key)
        if known is None or known.order != order or not _are_same(known.captured, captured):
            self.run_body_instead()
            leaves, known = self._recorded(captured, order, static, tensors, record)
            self._known.put(key, known)
            return known.finish(leaves)
        with ExitStack() as stack:
            for context in _contexts():
                stack.enter_context(context)
            made = iter(known.run(tensors))
        leaves = [next(made) if other is _TENSOR else other for other in known.others]
        return known.finish(leaves)

    def run_body_instead(self) -> None:
        """Requires that no other rank runs what is recorded, in another order than the body has.

        Raises:
            CollectiveMismatchError: another rank does something else.
            CommunicationError: another rank waits for this one in a collective.
        """
        if self.orders:
            agree(Description.of(self._name, [f"{self._name} runs its body, and not a recording"]))

    def _recorded(
        self,
        captured: Sequence[Tensor],
        order: Any,
        static: Sequence[Any],
        tensors: Sequence[Tensor],
        record: Record,
    ) -> tuple[list[Any], Recording]:
        inputs = _separate(tensors, captured)
        torch.clear_autocast_cache()  # it may have casts of captured tensors, which have no number
        recorder = OperatorTape(self._name, inputs, captured)
        try:
            with Looking(), recorder:
                leaves, finish = record(recorder, inputs)
            others, run = self._program(recorder, leaves, static)
        finally:
            recorder.forget()
        return list(leaves), Recording(run, others, finish, list(captured), order)

    def _program(
        self, recorder: OperatorTape, leaves: Sequence[Any], static: Sequence[Any]
    ) -> tuple[list[Any], Runnable]:
        """Returns the leaves that are no tensors, and what computes those that are."""
        recorder.require_unmoved()
        made = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        if any([x.requires_grad for x in made]):
            raise TransformError(_TRACKED.format(self._name))
        for leaf in leaves:
            if not isinstance(leaf, (Tensor, *_VALUES)) and not any([leaf is x for x in static]):
                raise TransformError(_OBJECT.format(self._name, type(leaf).__name__))
        program = simplify(recorder, [recorder.number(x) for x in made])
        if self._schedule == "overlap" and has_messages(program):
            program, is_reordered = overlapped(program)
            if is_reordered:
                self.orders.append([f"  recording {len(self.orders)}:", *order_of(program)])
        others = [_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        return others, runnable(program, self._name)


@dataclass(frozen=True, eq=False, slots=True)
class Replays:
    """The recordings of a verdict, for one call; see `Recordings.run`."""

    recordings: Recordings
    captured: Sequence[Tensor]
    order: Any
    static: Sequence[Any]

    def run(self, rank: int | None, tensors: Sequence[Tensor], record: Record) -> Any:
        """Runs what is recorded for tensors that cross into the body, or records it."""
        given = self.captured, self.order, self.static
        return self.recordings.run(*given, rank, tensors, record)


def _are_same(some: Sequence[Tensor], others: Sequence[Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))


def _separate(tensors: Sequence[Tensor], captured: Sequence[Tensor]) -> list[Tensor]:
    """Returns an object for each one; of tensors that share memory, copies in the same strides."""
    every = {id(x): x for x in tensors}
    storages = Counter(x.untyped_storage()._cdata for x in (*every.values(), *captured))
    separate = {}
    for x in every.values():
        y = x.detach() if storages[x.untyped_storage()._cdata] == 1 else _copied(x)
        y = torch.nn.Parameter(y, False) if isinstance(x, torch.nn.Parameter) else y
        separate[id(x)] = y.requires_grad_(x.requires_grad)
    return [separate[id(x)] for x in tensors]


def _first_of_each(tensors: Sequence[Tensor]) -> tuple[int, ...]:
    """Returns for each tensor where it stands first; nothing where each stands once."""
    ids = [*map(id, tensors)]
    return () if len({*ids}) == len(ids) else tuple(map(ids.index, ids))


def _copied(x: Tensor) -> Tensor:
    span = 1 + sum([(n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)])
    memory = x.detach().as_strided((span if x.numel() else 0,), (1,))
    return memory.clone().as_strided(x.shape, x.stride(), 0)


def _contexts() -> Iterator[Any]:
    """Yields what recorded operators run under: casts and derivatives are among them."""
    if torch.is_grad_enabled():
        yield torch.no_grad()
    for device in _DEVICES:
        if torch.is_autocast_enabled(device):
            yield torch.autocast(device, enabled=False)


def serves(tensors: Sequence[Tensor]) -> bool:
    """Returns whether a recorded run computes all that is wanted of the body.

    Not where a derivative from outside, a transform or a mode wants to see its operators, nor
    where a tensor has more to it than its entries, as attributes or a gradient.
    """
    if are_transforms_active() or forward_level() >= 0:
        return False
    if dispatch_mode_stack() or num_function_modes():
        return False
    if torch.is_grad_enabled() and any([x.requires_grad for x in tensors]):
        return False
    return all(map(_is_plain, tensors))


def _is_plain(x: Tensor) -> bool:
    if type(x) not in _PLAIN or x.is_conj() or x.is_neg() or x.__dict__:
        return False
    return not x.is_leaf or x.grad is None


def require_recordable(call: Call, verdict: Verdict) -> None:
    """Requires that a later run does what the recorded one did.

    Raises:
        TransformError: it would not.
    """
    for why in _obstacles(call, verdict):
        raise TransformError(_CANNOT.format(call.name, why))


def _obstacles(call: Call, verdict: Verdict) -> Iterator[str]:
    traits = verdict.traits
    if traits.draws:
        yield "it draws from torch's default generator; draw from a key of shardmap_torch.random"
    if traits.averages:
        yield (
            "it averages a cross entropy over a sharded dim, and runs look whether a target is "
            "ignored; take reduction='sum', and divide by the global number of targets"
        )
    if verdict.altered:
        yield "it changes what its code refers to; take that as an argument, and return the new one"
    if len(verdict.program_paths) > 1:
        yield "it branches on numbers taken from tensors; choose by torch.where"
    if call.mapped != call.mesh.axis_names:
        yield "over the axes that it does not bind, torch shards its values"
    if any([equation.name.startswith("#") for equation in verdict.equations]):
        yield "it takes numbers out of tensors; compute on the tensors themselves"


class _Lines:
    """Has the user's line of the collective that a recorded run is at, as a monitor has it."""

    site: Any = None


def run_process(call: Call, backend: ProcessGroupBackend, tensors: Sequence[Tensor]) -> Result:
    """Runs the body on one process, as it was recorded."""
    replays: Replays | None = call.recordings
    assert replays is not None
    if not serves(tensors):
        replays.recordings.run_body_instead()
        return run_body(call, backend, tensors)

    def record(recorder: OperatorTape, inputs: Sequence[Tensor]) -> Leaves:
        result = run_body(call, RecordingBackend(backend, recorder), inputs)
        return result.leaves, partial(Result, match=result.match, structure=result.structure)

    lines: Any = _Lines()
    with enter_scope(Scope(backend, call.bound, lines)):
        found: Result = replays.run(backend.rank, tensors, record)
    return found


def run_simulated(call: Call, run: Callable[[Call], Tree]) -> Tree:
    """Runs a call on all simulated ranks, as it was recorded."""
    assert call.recordings is not None

    def record(recorder: OperatorTape, inputs: Sequence[Tensor]) -> Leaves:
        given = put(call.leaves, call.crossing, inputs)
        leaves, structure = flatten(run(replace(call, leaves=given, recordings=None)))
        return leaves, partial(unflatten, structure)

    return call.recordings.run(None, [call.leaves[position] for position in call.crossing], record)


def switches() -> tuple[Any, ...]:
    """Returns the values of switches that can change in a process, beside those in a signature."""
    backends: Any = torch.backends  # stubs lack some
    cuda, cudnn, mkldnn = backends.cuda, backends.cudnn, backends.mkldnn
    return (
        torch.is_inference_mode_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.is_anomaly_enabled(),
        torch.is_autocast_cache_enabled(),
        cuda.flash_sdp_enabled(),
        cuda.mem_efficient_sdp_enabled(),
        cuda.math_sdp_enabled(),
        cuda.cudnn_sdp_enabled(),
        cuda.matmul.fp32_precision,  # the precision of matmuls decides; asking for that may raise
        torch.backends.mha.get_fastpath_enabled(),
        mkldnn.enabled,
        mkldnn.matmul.fp32_precision,
        mkldnn.conv.fp32_precision,
        cudnn.conv.fp32_precision,
        cudnn.enabled,
        cudnn.benchmark,
        cudnn.deterministic,
        (backends.opt_einsum.enabled, backends.opt_einsum.strategy),  # the order of contractions
        sys.float_info.min / 2 == 0.0,  # torch.set_flush_denormal
    )

"""AbstractBackend: types the collectives of a body that is interpreted."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.vmap import SPREAD
from shardmap_torch.checker.interpreter import messages, proposals
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting
from shardmap_torch.checker.ir.fake_results import empty
from shardmap_torch.checker.ir.own_functions import rejects_transforms
from shardmap_torch.checker.ir.program import Equation, bytes_sent, is_constant, use_of
from shardmap_torch.checker.ir.repairs import Repair, Spot, collective_call
from shardmap_torch.checker.rewrites.rank_numbers import Asking
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.collectives.moves import EXTREMA, MOVEMENTS
from shardmap_torch.collectives.operations import Collective, Extremum
from shardmap_torch.collectives.protocol import Readings, WithoutAutomaticAxes
from shardmap_torch.core.source_location import call_sites
from shardmap_torch.core.torch_private.engine import DisableTorchFunction, current_autograd_node
from shardmap_torch.errors import CollectiveError, ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType, I, K, Partial, R, V, Z

FORWARD: Final = {
    I: frozenset({I, K, Z}),
    R: frozenset({R, K, Z}),
    V: frozenset({V, Z}),
    # V is accepted for Partial in sums: the ranks' values are the addends, as in JAX.
    Partial: frozenset({Partial, V, Z}),
}
"""Operand types accepted for the source type of a row."""

BACKWARD: Final = {**FORWARD, V: frozenset({V, R, K, Z})}
"""The same for cotangents: a cotangent that is equal on all ranks may be used as each rank's."""

EXACTLY: Final = {**FORWARD, Partial: frozenset({Partial, Z})}
"""The same where a value keeps its type."""


class AbstractBackend(WithoutAutomaticAxes):
    """Backend that types collectives; their results have the right shape and no data."""

    def __init__(self, interpreter: Interpreter, repair: Repair, readings: Readings) -> None:
        """Makes one for an interpretation; `repair` is applied to its collectives."""
        self.mesh: Mesh = interpreter.mesh
        self._interpreter, self._repair, self._readings = interpreter, repair, readings

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """Returns none: a body is interpreted as one rank."""
        return ()

    def needs_ranks(self) -> None:
        self._interpreter.needs_ranks()

    @contextmanager
    def first_run(self) -> Iterator[None]:
        """Follows switches of gradients in this context, which change nothing that can be seen.

        Under torch.func it runs while the mode of functions applies the Function, and is off.
        """
        with Setting(self._interpreter, switches=()), self.seeing():
            yield

    def seeing(self) -> AbstractContextManager[object]:
        return self._interpreter.seeing()

    def begin_call(
        self, written: Sequence[Tensor], read: Sequence[Tensor]
    ) -> Callable[[], AbstractContextManager[None]]:
        return self._interpreter.copies.begin_call(self._interpreter, written, read)

    def read(self, x: Tensor) -> tuple[AxisType, AxisType]:
        """The readings, the same on all paths; they matter where a gradient flows."""
        self._readings.asked |= self._interpreter.flows(self._interpreter.base(x))
        return self._readings.uncommitted, self._readings.copies

    def is_cast(self) -> bool:
        """Notes the call whose collective ran last as one that may be cast; returns if it is."""
        lines = call_sites()
        self._readings.results[self._interpreter.equations[-1]] = lines
        return lines in self._readings.cast

    def reduction(self, op: str, axes: Sequence[str], x: object) -> tuple[str, int]:
        spot = collective_call()
        op, other = self._repair.op_at(spot, op), self._repair.collectives.get(spot)
        num_ranks = self.mesh.num_ranks(axes if other is None else other.axes)
        if spot is not None and op in ("sum", "mean") and num_ranks > 1:  # of one both are the same
            self._interpreter.traits.reductions[spot] = op
        return op, num_ranks

    def require(self, name: str, axes: Sequence[str], axis_type: AxisType, x: Tensor) -> None:
        interpreter = self._interpreter
        have = interpreter.by_axis(interpreter.types_of(x))
        for axis in axes:
            if plain(have[axis]) not in EXACTLY[axis_type]:
                head = f"{name} from {axis_type} over {axis!r}, but the value is {have[axis]}."
                lines = [f"  the value is from {interpreter.storage_type(x).origin()}"]
                fix = f"say src={have[axis]}."
                wrong = messages.error(interpreter, head, lines, fix, types=[have[axis]])
                interpreter.numbers.branches.fail(wrong)

    def index(self, axes: Sequence[str]) -> Tensor:
        """Returns an index of type V over `axes` and K over all others."""
        interpreter = self._interpreter
        with interpreter.paused():
            index = torch.zeros((), dtype=torch.int64, device=self.mesh.device)
        names = axes[0] if len(axes) == 1 else tuple(axes)
        types = tuple(V if axis in axes else K for axis in interpreter.axes)
        storage_type = interpreter.bring(index, types, "")
        site, backward = interpreter.site()
        storage_type.made = Equation(
            f"axis_index({names!r})", (), (use_of("", index, storage_type),), site, backward
        )
        interpreter.add(storage_type.made)
        interpreter.observer.on_axis_index(index, axes)
        return index

    def reject_lost(self, name: str) -> None:
        if not rejects_transforms(current_autograd_node()):
            raise CollectiveError(
                f"{name} of torch.distributed is called in the backward of an autograd.Function "
                "with setup_context, and torch.func would differentiate it again without the call. "
                "Derive the Function from shardmap_torch.Function, whose backward is typed."
            )

    def note_asked(self, axes: Sequence[str]) -> None:
        """Notes that on one device the body may take other steps, for one rank."""
        self._interpreter.traits.asks |= {*axes}

    def note_untraced(self, what: str) -> None:
        self._interpreter.traits.untraced = what

    def rank_along(self, axes: tuple[str, ...]) -> Any:
        """Returns the position along `axes`, as a number that differs by rank."""
        interpreter = self._interpreter
        interpreter.numbers.differ_by_rank = True
        interpreter.needs_ranks("a number that differs by rank")
        self.note_asked(axes)
        return Asking(interpreter, self).rank_along(axes)

    def reduce_gradient(self, axes: Sequence[str], gradient: Tensor) -> Tensor:
        """Records the all-reduce of an input's gradient that its spec implies; returns its result.

        One device has no such step to compare.
        """
        interpreter = self._interpreter
        collective = Collective("convert", I, R, tuple(axes)).transpose
        storage_type = interpreter.storage_type(gradient)
        types = tuple(
            I if axis in axes else axis_type
            for axis, axis_type in interpreter.by_axis(storage_type.types).items()
        )
        nbytes = gradient.numel() * gradient.element_size()
        sent = bytes_sent(collective, nbytes, self.mesh.num_ranks(axes))
        operand = use_of("x", gradient, storage_type)
        equation = Equation(str(collective), (operand,), (), None, True, collective, sent)
        with interpreter.paused():
            reduced = torch.empty_like(gradient)
        interpreter.make(reduced, types, equation, [])
        interpreter.add(equation)
        interpreter.observer.aside.on_collective(collective.move, collective, gradient, reduced)
        return reduced

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        # The function mode would see each question for a shape.
        with self._interpreter.numbers.branches, DisableTorchFunction():
            try:
                return self._run(move, collective, x)
            except ShardTypeError as error:
                proposals.at_collective(self._interpreter, error, move, collective, x)
                raise

    def _run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        interpreter = self._interpreter
        site, backward = interpreter.site()
        forward = interpreter.forward_of_current_node() if backward else None
        spot = collective_call()
        applied = self._repaired(collective, forward, spot)
        if applied is not None and move not in EXTREMA:
            move = applied.move
        x = interpreter.fakify(x)
        interpreter.copies.reject_stale(interpreter, [x])
        storage_type = interpreter.storage_type(x)
        operand = use_of("x", x, storage_type)
        shown = _shown(move, applied)
        equation = Equation(shown, (operand,), (), site, backward, applied, forward=forward)
        types, shape = storage_type.types, tuple(x.shape)
        if not backward:
            equation.spot, equation.written = spot, collective
        if applied is not None:
            with torch.enable_grad():  # off in the forward of a Function, whatever flows through it
                read = interpreter.types(x)
            self._check_source(move, applied, equation, read)
            types = self._result_types(applied, forward, storage_type.types)
            num_ranks = self.mesh.num_ranks(applied.axes)
            shape = MOVEMENTS[move].shape(applied, shape, num_ranks)
            equation.sent = bytes_sent(applied, x.numel() * x.element_size(), num_ranks)
        with interpreter.paused():
            y = empty(interpreter.fake, shape, x.dtype, x.device)
        result = interpreter.make(y, types, equation, [x])
        result.batched_over = self._batched_over(move, collective, result.batched_over)
        if (MOVEMENTS[move].shares or applied is None) and not backward:
            for each in (result, storage_type):  # one memory at run time, with two types
                each.freeze(f"shares its memory with another value through {shown}")
        interpreter.add(equation)
        interpreter.observer.on_collective(move, applied, x, y)
        return y

    def _batched_over(
        self, move: str, collective: Collective, operand: frozenset[int]
    ) -> frozenset[int]:
        """Returns the axes over which a batched body has the result batched."""
        own = {self._interpreter.axes.index(axis) for axis in collective.axes}
        if MOVEMENTS[move].equal:
            return operand - own
        stays = move == "same" and (collective.src, collective.dst) not in SPREAD
        return operand if stays else operand | own

    def _repaired(
        self, collective: Collective, forward: Equation | None, spot: Spot | None
    ) -> Collective | None:
        """Returns the collective under the repair that is tried; None if it is left out."""
        if spot in self._repair.collectives:
            return self._repair.collectives[spot]
        if spot in self._repair.turned:
            return collective.transpose
        if forward is None or forward.written is None or forward.written == forward.collective:
            return collective
        if collective != forward.written.transpose:
            return collective
        return None if forward.collective is None else forward.collective.transpose

    def _check_source(
        self, move: str, collective: Collective, equation: Equation, read: tuple[AxisType, ...]
    ) -> None:
        """Requires a valid operand type; `read` are its types with K if it has no gradient."""
        expected = V if move in EXTREMA else collective.src
        accepted = (BACKWARD if equation.backward else FORWARD)[plain(expected)]
        for axis, axis_type, as_read in zip(
            self._interpreter.axes, equation.operands[0].types, read, strict=True
        ):
            matches = plain(axis_type) in accepted or as_read in accepted
            matches |= axis_type == K and move == "sum" and _counts(equation)
            if axis in collective.axes and not matches:
                raise messages.source(self._interpreter, equation, axis, expected)
            if axis not in collective.axes and axis_type == Partial and move in EXTREMA:
                raise messages.source(self._interpreter, equation, axis, V)

    def _result_types(
        self, collective: Collective, forward: Equation | None, types: tuple[AxisType, ...]
    ) -> tuple[AxisType, ...]:
        result = []
        for position, (axis, axis_type) in enumerate(self._interpreter.by_axis(types).items()):
            dst = collective.dst if axis in collective.axes else axis_type
            if dst == R and _summed_varying(forward, collective, axis, position):
                # The sum has reinterpreted V as Partial implicitly: the transpose of that makes V.
                dst = V
            result.append(dst)
        return tuple(result)


def _counts(equation: Equation) -> bool:
    """Returns whether a sum is that of a number from sizes, as of each rank's rows.

    What else is equal on all ranks is rarely meant to be added up.
    """
    (x,) = equation.operands
    return not equation.backward and prod(x.shape) == 1 and is_constant(x.storage_type)


def _shown(move: str, collective: Collective | None) -> str:
    if collective is None:
        return "nothing"
    return str(Extremum(move, collective) if move in EXTREMA else collective)


def _summed_varying(
    forward: Equation | None, collective: Collective, axis: str, position: int
) -> bool:
    """Returns whether `collective` is the transpose of a sum over `axis` that took a V."""
    return (
        forward is not None
        and forward.collective is not None
        and forward.name == str(forward.collective)  # no extremum
        and forward.collective.transpose == collective
        and axis in forward.collective.axes
        and forward.collective.src == Partial
        and plain(forward.operands[0].types[position]) == V
    )

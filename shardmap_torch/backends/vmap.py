"""Backend of simulated ranks as one program under nested `torch.func.vmap`, a level per mesh axis.

A value is batched at an axis' level exactly when it varies over that axis, so values that are equal
on all ranks are computed once. Each level has a marker, `arange(size)` batched there alone, and
every collective takes the markers of its axes as operands: a level at which a marker is batched is
the collective's own, any other (another mesh axis, the user's own vmap) is passed through. Where no
levels are open but those of axes, the values of all ranks are taken out of all of them at once.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.folding import sum_of
from shardmap_torch.backends.rank import on_one_rank
from shardmap_torch.backends.reference import REFERENCE, Stack
from shardmap_torch.backends.traffic import pass_door
from shardmap_torch.collectives.autograd import apply_transformed, unshared
from shardmap_torch.collectives.moves import Movement
from shardmap_torch.collectives.operations import Collective, Extremum, Operation, is_rounded_by
from shardmap_torch.collectives.protocol import WithoutAutomaticAxes
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.caching import Memo, constant, memo
from shardmap_torch.core.functorch import base_of, batched_at, dims_of, stacked_over
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.torch_private.engine import (
    forward_level,
    functorch,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.errors import TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import Partial, R, V

SPREAD: Final = frozenset({(R, V), (R, Partial)})
"""Casts (src, dst) that move no data, but after which ranks may write different values."""


@dataclass(frozen=True)
class Staged:
    """An operation some of whose axes' levels have been opened.

    Attributes:
        operation: the operation as the body called it.
        pending: axes whose level is still closed, in the order of their markers.
        opened: axes whose level is open, newest first, and whether the operand varies there; it
            has one leading dim for each axis over which it varies, in this order.
    """

    operation: Any
    pending: tuple[str, ...]
    opened: tuple[tuple[str, bool], ...]

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes whose markers are still operands."""
        return self.pending


class BatchedBackend(WithoutAutomaticAxes):
    """Backend of all ranks at once; `axes` are the vmap levels that are open around the body."""

    def __init__(
        self, mesh: Mesh, axes: Mapping[str, Tensor], levels: Mapping[str, int] | None = None
    ) -> None:
        """`axes` maps each axis name to its marker, and `levels` to its level, where known."""
        self.mesh = mesh
        self.axis_markers = dict(axes)
        self.levels = dict(levels or {})
        self.readings = None if torch.compiler.is_dynamo_compiling() else _readings(mesh)
        count = len(self.levels)
        self._innermost = count if {*self.levels.values()} == {*range(1, count + 1)} else 0

    def is_alone(self) -> bool:
        """Returns whether no transforms are active but the levels of the axes."""
        top = functorch.peek_interpreter_stack()
        return top is not None and top.level() == self._innermost and forward_level() < 0

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(self.axis_markers[axis] for axis in axes)

    def index(self, axes: Sequence[str]) -> Tensor:
        """Returns the index of each rank along `axes`, which varies over all of them."""
        index = torch.zeros((), dtype=torch.int64)
        for axis in axes:
            index = index * self.mesh.shape[axis] + self.axis_markers[axis]
        return index

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a move over no axes: the levels of others are resolved before.

        Raises:
            TransformError: over some axes, since the body has ended then.
        """
        if not collective.axes:
            return on_one_rank(move, collective, x)
        raise TransformError(
            f"{collective} ran after the batched body had ended, where its ranks exist no more. "
            'Use make_mesh(..., simulate="ranks") for code that runs backward by itself.'
        )

    def at_once(self, operation: Any, x: Tensor) -> Tensor | None:
        """Runs an operation on the values of all ranks, taken out of all levels.

        Returns None where it has to go through them one after the other: others are open too, or
        the operation does not name the dims that it moves.
        """
        if operation.movement.ragged or not self.is_alone():
            return None
        _reject_rounding(operation, x)
        x = functorch.unwrap_if_dead(x)
        dims, at = dims_of(x)
        if operation.movement.still:
            is_spread = (operation.src, operation.dst) in SPREAD
            is_equal = any(self.levels[axis] not in at for axis in operation.axes)
            return None if is_spread and is_equal else x
        with temporarily_clear_interpreter_stack():
            base = base_of(x)
            y, axes = sum_of(operation, base), _axes_after(operation)
            if y is None:
                leading = [axis for axis, level in self.levels.items() if level in at]
                base = _permuted(base, [*[at[self.levels[axis]] for axis in leading], *dims])
                y, axes = moved(self.mesh, operation, base, leading)
        return batched_at(y, [self.levels[axis] for axis in axes])

    def on_stacks(
        self,
        function: Callable[..., Tensor | None],
        *xs: Tensor,
        summed: Sequence[str] = (),
    ) -> Tensor | None:
        """Applies a function that treats leading dims alike to the values of all ranks.

        It gets them stacked over the axes over which any of them varies, with length 1 where one
        is equal on all ranks, and the lengths of its result: 1 over the axes `summed`. None where
        it returns that, nothing varies over one of these, or other levels are open too.
        """
        if not self.is_alone():
            return None
        xs = tuple(functorch.unwrap_if_dead(x) for x in xs)
        varies = {level for x in xs for level in dims_of(x)[1]}
        axes = {axis: level for axis, level in self.levels.items() if level in varies}
        if not axes.keys() >= {*summed}:
            return None
        levels, sizes = [*axes.values()], [1 if a in summed else self.mesh.shape[a] for a in axes]
        stacks = [stacked_over(x, levels) for x in xs]
        with temporarily_clear_interpreter_stack():
            y = function(*stacks, tuple(sizes))
            if y is None:
                return None
            kept = [level for axis, level in axes.items() if axis not in summed]
            y = y[tuple([0 if a in summed else slice(None) for a in axes])] if summed else y
        return batched_at(y, kept)

    def trace(self, operation: Operation, x: Tensor, markers: Sequence[Tensor]) -> Tensor:
        """Runs an operation while Dynamo traces: its graph calls it, and AOTAutograd looks into it.

        Dynamo has levels of vmap of its own, and knows no autograd Function under them.
        """
        total = operation.total if isinstance(operation, Extremum) else operation
        extremum = operation.move if isinstance(operation, Extremum) else ""
        _allow_in_graph()
        number = _keep(self.mesh, extremum, *[getattr(total, name) for name in _FIELDS])
        return _apply_in_graph(number, x, *markers)

    def resolve(
        self, operation: Any, x: Tensor, x_dim: int | None, markers: Sequence[Tensor], level: int
    ) -> tuple[Tensor, int | None]:
        """Opens one level: the vmap rule of a collective at the level of one of its own axes."""
        staged = operation if isinstance(operation, Staged) else _staged(operation, x)
        movement: Movement = staged.operation.movement
        axis = staged.pending[level]
        if movement.still:
            others = (*markers[:level], *markers[level + 1 :])
            return self._same(staged.operation, x, x_dim, axis, others)
        if x_dim is not None:
            x = x.movedim(x_dim, 0)
        opened = Staged(
            staged.operation,
            staged.pending[:level] + staged.pending[level + 1 :],
            ((axis, x_dim is not None), *staged.opened),
        )
        rest = (*markers[:level], *markers[level + 1 :])
        out = apply_transformed(x, opened, self, *rest) if rest else self._complete(opened, x)
        return out, None if movement.equal else 0

    def _same(
        self, operation: Any, x: Tensor, x_dim: int | None, axis: str, others: Sequence[Tensor]
    ) -> tuple[Tensor, int | None]:
        """Returns the value itself, batched if it was equal on all ranks and may now vary."""
        if (operation.src, operation.dst) not in SPREAD:
            return unshared(x), x_dim
        if x_dim is None:
            x, x_dim = x.expand(self.mesh.shape[axis], *x.shape), 0
        for marker in others:
            x = torch.where(marker >= 0, x, x)
        return unshared(x), x_dim

    def _complete(self, staged: Staged, x: Tensor) -> Tensor:
        """Moves the data of all ranks once all levels are open, in the order of the axes' tuple."""
        leading = [axis for axis, varies in staged.opened if varies]
        y, axes = moved(self.mesh, staged.operation, x, leading)
        back = [axes.index(axis) for axis, _ in staged.opened] if axes else []
        if back == sorted(back):  # a view of what a Function makes could not be written to
            return y
        return y.permute([*back, *range(len(back), y.ndim)])


@memo
def _readings(mesh: Mesh) -> Memo[Any]:
    """Returns what the collectives of bodies on a mesh mean; a body has a backend of its own."""
    return Memo[Any]()


def moved(
    mesh: Mesh, operation: Any, x: Tensor, leading: Sequence[str]
) -> tuple[Tensor, tuple[str, ...]]:
    """Moves the data of all ranks, which `x` has along leading dims for these axes.

    Returns:
        The result, and the axes of its leading dims.
    """
    axes: tuple[str, ...] = tuple(operation.axes)
    own = [axis for axis in axes if axis in leading]
    others = [axis for axis in leading if axis not in axes]
    order = [leading.index(axis) for axis in (*own, *others)]
    x = _permuted(x, [*order, *range(len(order), x.ndim)])
    sizes = [mesh.shape[axis] for axis in axes]
    if own and len(axes) > 1:
        for position, axis in enumerate(axes):
            if axis not in own:
                x = x.unsqueeze(position)
        x = x.expand(*sizes, *x.shape[len(axes) :]).flatten(0, len(axes) - 1)
    y: Tensor = operation.run(_StackRunner(mesh, bool(own), prod(sizes), len(others)), x)
    if operation.movement.views and memory_of(y) == memory_of(x):
        y = y.clone()
    after = _axes_after(operation)
    return (y.unflatten(0, sizes) if len(after) > 1 else y), (*after, *others)


def _permuted(x: Tensor, order: list[int]) -> Tensor:
    """Permutes dims; an operation that changes nothing would cost its backward one too."""
    return x if order == [*range(x.ndim)] else x.permute(order)


def _axes_after(operation: Any) -> tuple[str, ...]:
    """The axes over which the result of an operation varies."""
    return () if operation.movement.equal else tuple(operation.axes)


def _staged(operation: Any, x: Tensor) -> Staged:
    _reject_rounding(operation, x)
    return Staged(operation, tuple(operation.axes), ())


def _reject_rounding(operation: Any, x: Tensor) -> None:
    """Rejects an operation whose gradient from outside is not rounded as the collective says.

    Raises:
        TransformError: always then.
    """
    if is_rounded_by(operation, x):
        raise TransformError(_ROUNDS.format(operation))


_ROUNDS: Final = (
    "{}: one batched program differentiates it from outside in the dtype of the operand, not in "
    "those that comm_dtype and grad_comm_dtype name. Use a mesh of "
    'make_mesh(..., simulate="ranks"), which "auto" chooses here.'
)

_FIELDS: Final = tuple([field.name for field in fields(Collective)])

_TRACED: list[tuple[Mesh, Operation]] = []
"""The operations of compiled bodies; a graph holds numbers and tensors only."""


@constant
def _keep(mesh: Mesh, extremum: str, *values: Any) -> int:
    """Returns the number of an operation.

    It comes by its fields: Dynamo cannot hand out an object whose making it has traced.
    """
    total = Collective(*values)
    traced = mesh, Extremum(extremum, total) if extremum else total
    if traced not in _TRACED:
        _TRACED.append(traced)
    return _TRACED.index(traced)


def _apply_in_graph(number: int, x: Tensor, *markers: Tensor) -> Tensor:
    mesh, operation = _TRACED[number]
    backend = BatchedBackend(mesh, dict(zip(operation.axes, markers, strict=True)))
    return apply_transformed(x, operation, backend, *markers)


@constant
def _allow_in_graph() -> None:
    torch.compiler.allow_in_graph(_apply_in_graph)


def markers_of(scope: Scope | None) -> tuple[Tensor, ...]:
    """Returns the markers of all axes that are bound in a batched body; none elsewhere."""
    if scope is None or not isinstance(scope.backend, BatchedBackend):
        return ()
    return tuple(scope.backend.axis_markers.values())


def rebound(scope: Scope | None, markers: Sequence[Tensor]) -> Scope | None:
    """Returns the scope with other markers: those of levels that were opened again.

    Code that runs again in a backward takes the markers as operands and rebinds them here, because
    the levels that the first run had opened are closed by then.
    """
    if scope is None or not isinstance(scope.backend, BatchedBackend):
        return scope
    named = dict(zip(scope.backend.axis_markers, markers, strict=True))
    backend = BatchedBackend(scope.backend.mesh, named)
    return Scope(backend, scope.axes, scope.monitor, reruns=scope.reruns)


class _StackRunner:
    """A backend whose local value is the stack of all ranks' values.

    Other axes have `num_others` dims between that of the ranks and the local ones.
    """

    def __init__(self, mesh: Mesh, varies: bool, num_ranks: int, num_others: int) -> None:
        self.mesh, self._varies, self._num_ranks = mesh, varies, num_ranks
        self._num_others = num_others

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        num_copies = prod(x.shape[: int(self._varies) + self._num_others])
        pass_door(collective, x.nbytes / max(num_copies, 1), self._num_ranks)
        shifted = _behind(collective, self._num_others)
        return REFERENCE[move](shifted, Stack(x, self._varies, self._num_ranks)).value


@memo
def _behind(collective: Collective, count: int) -> Collective:
    """Returns the collective of values that have so many dims before those that it names."""
    dim, concat_dim = collective.dim + count, collective.concat_dim + count
    return replace(collective, dim=dim, concat_dim=concat_dim) if count else collective

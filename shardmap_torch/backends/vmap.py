"""Backend of simulated ranks as one program under nested `torch.func.vmap`, a level per mesh axis.

A value is batched at an axis' level exactly when it varies over that axis, so values that are equal
on all ranks are computed once. Each level has a marker, `arange(size)` batched there alone, and
every collective takes the markers of its axes as operands: a level at which a marker is batched is
the collective's own, any other (another mesh axis, the user's own vmap) is passed through.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.backends.folding import sum_of
from shardmap_torch.backends.local_movements import on_one_rank
from shardmap_torch.backends.reference import MOVES, Stack
from shardmap_torch.collectives.autograd import apply_transformed, unshared
from shardmap_torch.collectives.moves import MOVES as TRAITS
from shardmap_torch.collectives.operations import Collective, Extremum, Operation, is_rounded_by
from shardmap_torch.collectives.protocol import WithoutAutomaticAxes
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.caching import constant
from shardmap_torch.core.storage import memory_of
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

    def __init__(self, mesh: Mesh, axes: Mapping[str, Tensor]) -> None:
        """`axes` maps each axis name to its marker."""
        self.mesh = mesh
        self.axis_markers = dict(axes)

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        return tuple(self.axis_markers[axis] for axis in axes)

    def needs_ranks(self) -> None:
        """Does nothing: the user asked for this strategy."""

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
        move: str = staged.operation.move
        axis = staged.pending[level]
        if move == "same":
            others = (*markers[:level], *markers[level + 1 :])
            return self._same(staged.operation, x, x_dim, axis, others)
        total = sum_of(operation, x)
        if total is not None:
            return total, None if TRAITS[move].equal else 0
        if x_dim is not None:
            x = x.movedim(x_dim, 0)
        opened = Staged(
            staged.operation,
            staged.pending[:level] + staged.pending[level + 1 :],
            ((axis, x_dim is not None), *staged.opened),
        )
        rest = (*markers[:level], *markers[level + 1 :])
        out = apply_transformed(x, opened, self, *rest) if rest else self._complete(opened, x)
        return out, None if TRAITS[move].equal else 0

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
        axes: tuple[str, ...] = tuple(staged.operation.axes)
        if len(axes) == 1:
            (_, varies) = staged.opened[0]
            return self._move(staged.operation, x, varies, self.mesh.shape[axes[0]])
        opened = [axis for axis, _ in staged.opened]
        sizes = [self.mesh.shape[axis] for axis in axes]
        order = [opened.index(axis) for axis in axes]
        varies = any(varying for _, varying in staged.opened)
        if varies:
            x = self._expand(staged, x).permute(
                *order, *range(len(axes), len(axes) + self._local_ndim(staged, x))
            )
            x = x.flatten(0, len(axes) - 1)
        y: Tensor = self._move(staged.operation, x, varies, prod(sizes))
        if TRAITS[staged.operation.move].equal:
            return y
        y = y.unflatten(0, sizes)
        back = [axes.index(axis) for axis in opened]
        return y.permute(*back, *range(len(axes), y.ndim))

    def _move(self, operation: Any, x: Tensor, varies: bool, num_ranks: int) -> Tensor:
        """Moves data that is stacked along one dim, if it varies."""
        y: Tensor = operation.run(_StackRunner(self.mesh, varies, num_ranks), x)
        if TRAITS[operation.move].sends and memory_of(y) == memory_of(x):
            y = y.clone()
        return y

    def _local_ndim(self, staged: Staged, x: Tensor) -> int:
        return x.ndim - sum(varying for _, varying in staged.opened)

    def _expand(self, staged: Staged, x: Tensor) -> Tensor:
        """Gives `x` a leading dim for every opened axis."""
        for position, (axis, varying) in enumerate(staged.opened):
            if not varying:
                shape = list(x.shape)
                shape.insert(position, self.mesh.shape[axis])
                x = x.unsqueeze(position).expand(shape)
        return x


def _staged(operation: Any, x: Tensor) -> Staged:
    """Begins an operation.

    Raises:
        TransformError: a gradient from outside would not be rounded as the collective says.
    """
    if is_rounded_by(operation, x):
        raise TransformError(_ROUNDS.format(operation))
    return Staged(operation, tuple(operation.axes), ())


_ROUNDS: Final = (
    "{}: one batched program differentiates it from outside in the dtype of the operand, not in "
    "those that comm_dtype and grad_comm_dtype name. Use a mesh of "
    'make_mesh(..., simulate="ranks"), which "auto" chooses for checked functions.'
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
    """A backend whose local value is the stack of all ranks' values."""

    def __init__(self, mesh: Mesh, varies: bool, num_ranks: int) -> None:
        self.mesh, self._varies, self._num_ranks = mesh, varies, num_ranks

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        return MOVES[move](collective, Stack(x, self._varies, self._num_ranks)).value

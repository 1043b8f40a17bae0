"""Answers of torch.distributed and of the environment to a body that asks for its rank.

Where ranks are no processes, torch knows of none of them, or of the one process that runs them all;
and while a body is checked its rank is not the one of this process. So in such bodies torch's own
questions are answered here. Its collectives run as the typed ones in all bodies, on processes too.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from types import FrameType
from typing import Any, Final

from torch.distributed import ProcessGroup, distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.torch_private.world import Answering, World
from shardmap_torch.errors import CollectiveError
from shardmap_torch.mesh import Mesh, as_mesh
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.ops.groups import (
    REFUSED,
    AxisGroup,
    asked_rank,
    asked_scope,
    group_axes,
    own_group,
    size_along,
    typed_call,
)

_RANKS: Final = ("RANK", "LOCAL_RANK", "GROUP_RANK")
_SIZES: Final = ("WORLD_SIZE", "LOCAL_WORLD_SIZE")


def _asking() -> Scope | None:
    """Returns the scope of a body whose rank is not that of this process."""
    scope = asked_scope()
    if scope is None or (scope.backend.mesh.device_mesh is not None and not _is_checked(scope)):
        return None
    return scope


def _is_checked(scope: Scope) -> bool:
    return is_checker(scope.backend)


def _axes_of(mesh: Mesh, group: Any) -> tuple[str, ...] | None:
    if isinstance(group, AxisGroup):
        return group.axes
    is_group = isinstance(group, ProcessGroup)
    return group_axes(mesh, str(group.group_name)) if is_group else None


def _asked_of() -> AxisGroup | None:
    """Returns the group of axes that a function of torch is asked about outside of a body.

    A constructor asks so, on the group of one rank; torch would look for it among its own.
    """
    frame: FrameType | None = sys._getframe(1)
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if frame.f_globals is vars(distributed_c10d):
            group = frame.f_locals.get("group", frame.f_locals.get("pg"))
            if isinstance(group, AxisGroup):
                return group
        frame = frame.f_back
    return None


_DEPTH: Final = 7
"""Frames between this module and a function of torch that asks for groups."""

_OUTSIDE: Final[Mapping[str, Callable[[AxisGroup], Any]]] = {
    "pg_group_ranks": lambda group: {at: at for at in range(group.size())},
    "pg_map": lambda group: ("undefined", None),
    "pg_names": lambda group: group.group_name,
}
"""Tables that torch has for a group of axes, where no body runs."""


@dataclass(frozen=True, eq=False)
class _Position:
    """A position in a group, which is another one if it is so on any rank."""

    at: Any

    def __eq__(self, other: object) -> bool:
        same = self.at == other
        return all(getattr(same, "values", (same,)))

    __hash__ = object.__hash__


class _Members(Mapping[Any, Any]):
    """The positions in the group of axes, by rank of the mesh."""

    def __init__(self, scope: Scope, axes: tuple[str, ...]) -> None:
        self._scope, self._backend, self._axes = scope, scope.backend, axes

    def _own(self) -> Any:
        return asked_rank(self._scope, self._backend.mesh.axis_names)

    def __getitem__(self, rank: Any) -> Any:
        """Returns the position of a rank, also of one that differs by rank."""
        mesh, own = self._backend.mesh, self._own()
        if getattr(rank, "values", rank) == getattr(own, "values", own):  # this rank's
            return asked_rank(self._scope, self._axes)
        place, others = mesh.coordinates(rank), mesh.coordinates(own)
        apart = [a for a in mesh.axis_names if a not in self._axes and place[a] != others[a]]
        if apart:
            raise KeyError(rank)
        return mesh.index(self._axes, place)

    def __contains__(self, rank: object) -> bool:
        try:
            self[rank]
        except KeyError:
            return False
        return True

    def __iter__(self) -> Iterator[Any]:
        return (rank for rank, _ in list(self.items())[: len(self)])

    def items(self) -> Any:
        """Yields ranks with their positions, also those at a distance from this rank's own."""
        mesh, size = self._backend.mesh, len(self)
        own = mesh.coordinates(self._own())
        first = mesh.index(self._axes, own)
        distances = [] if type(first) is int else [(first + at) % size for at in range(size)]
        for at in (*range(size), *distances):
            there, rest = dict(own), at
            for axis in reversed(self._axes):
                rest, there[axis] = divmod(rest, mesh.shape[axis])
            yield mesh.rank_at(there), _Position(at)

    def __len__(self) -> int:
        """Returns the number of ranks of the group."""
        return self._backend.mesh.num_ranks(self._axes)


class _Groups(Mapping[Any, Any]):
    """One of torch's tables of groups, with those of axes."""

    def __init__(self, scope: Scope, table: str, known: Mapping[Any, Any]) -> None:
        self._scope, self._table, self._known = scope, table, known

    def __getitem__(self, group: Any) -> Any:
        axes = _axes_of(self._scope.backend.mesh, group)
        if axes is None or not (isinstance(group, AxisGroup) or self._table == "pg_group_ranks"):
            return self._known[group]
        if self._table == "pg_group_ranks":
            return _Members(self._scope, axes)
        return ("undefined", None) if self._table == "pg_map" else str(group.group_name)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._known)

    def __len__(self) -> int:
        return len(self._known)

    def __contains__(self, group: object) -> bool:
        if isinstance(group, AxisGroup) or group in self._known:
            return True
        return _axes_of(self._scope.backend.mesh, group) is not None


class _Answers(World):
    """Answers torch's questions in bodies, and leaves all others to torch."""

    def world(self, known: Any) -> Any:
        """Returns the group of all ranks of the mesh."""
        scope = _asking()
        if scope is None:
            return _asked_of() or known
        if scope.backend.mesh.device_mesh is not None:
            return known
        return AxisGroup(scope.backend.mesh, scope.backend.mesh.axis_names)

    def groups(self, table: str, known: Mapping[Any, Any]) -> Mapping[Any, Any]:
        scope = _asking()
        if scope is not None:
            return _Groups(scope, table, known)
        group = _asked_of()
        return known if group is None else {group: _OUTSIDE[table](group)}

    def rank(self, group: Any) -> Any:
        """Returns the position in torch's group of axes, of a body that is checked."""
        scope = _asking()
        if scope is None:
            return None
        axes = group_axes(scope.backend.mesh, str(group.group_name))
        if axes is None:
            raise CollectiveError(
                f"A body asks for its rank in a group that is none of the axes of the "
                f"{scope.backend.mesh}. Use axis_index(axis), a tensor that varies, or "
                "axis_group(mesh, axis).rank()."
            )
        return asked_rank(scope, axes)

    def size(self, group: Any) -> int | None:
        """Returns the number of ranks of torch's group of axes, on the mesh of the body."""
        scope = _asking()
        mesh = None if scope is None else scope.backend.mesh
        axes = None if mesh is None else group_axes(mesh, str(group.group_name))
        return None if axes is None or scope is None else size_along(scope, axes)

    def method(self, group: Any, name: str) -> Callable[..., Any] | None:
        """Returns the typed collective, for torch's group of axes."""
        scope = asked_scope()
        own = None if scope is None else own_group(scope, group)
        if own is None or (name in _MESSAGES and _asking() is None):
            return None
        if name in REFUSED and scope is not None and _is_checked(scope):
            return None  # the operator that it calls is refused
        return getattr(own, name)  # type: ignore[no-any-return]

    def called(self, name: str, args: tuple[Any, ...]) -> Any:
        scope = asked_scope()
        return NotImplemented if scope is None else typed_call(scope, name, args)

    def coordinate(self, mesh: DeviceMesh) -> list[Any] | None:
        scope = _asking()
        names = mesh.mesh_dim_names
        if scope is None or names is None or not {*names} <= {*scope.backend.mesh.axis_names}:
            return None
        return [asked_rank(scope, (axis,)) for axis in names]

    def variable(self, name: str) -> str | None:
        if name not in _RANKS and name not in _SIZES:
            return None
        scope = _asking()
        if scope is None:
            return None
        mesh = scope.backend.mesh
        if name in _SIZES:
            return str(mesh.size) if mesh.device_mesh is None else None
        rank: Any = 0 if name == "GROUP_RANK" else asked_rank(scope, mesh.axis_names)
        if _is_checked(scope) and type(rank) is not int:
            rank.refuse(
                f"{name} of the environment is text, which cannot differ by rank.",
                "use axis_index(axis), a tensor that varies, or axis_group(mesh, axis).rank()",
            )
        return None if rank is None else str(rank)


_MESSAGES: Final = ("send", "recv", "barrier")
"""Methods that are torch's own where ranks are processes."""

ANSWERING: Final = Answering(_Answers())
"""Answers bodies about their own ranks, and runs torch's collectives as ours, once it has begun."""


def axis_group(mesh: Mesh | DeviceMesh, axis: Axis) -> "ProcessGroup | AxisGroup":
    """Returns the group of `axis`, to be passed to functions of `torch.distributed` in a body.

    With it code that calls `torch.distributed` is checked, and runs, before it is rewritten: on a
    mesh of processes it is torch's own group, which `mesh.device_mesh.get_group(axis)` returns too;
    on a simulated or abstract mesh a stand-in. In a body these are typed:

    ========================================= ============================== =====================
    call                                      as                             types
    ========================================= ============================== =====================
    `all_reduce`                              `all_reduce(dst=I)`, in place  Partial→I (MAX: V→I)
    `all_gather`, `all_gather_into_tensor`    `all_gather(dst=I)` of dim 0   V→I
    `reduce_scatter`, `reduce_scatter_tensor` `reduce_scatter` of dim 0      Partial→V
    `all_to_all`, `all_to_all_single`         `all_to_all` of dim 0          V→V
    `broadcast`                               `broadcast(dst=I)`, in place   V→I
    `isend` and `irecv` of all ranks          `ppermute`                     V→V
    ========================================= ============================== =====================

    and `rank()`, `size()`, also as `dist.get_rank(group)`, `dist.get_world_size(group)`. Autograd
    does not see such a call, so that it is refused on tensors that need a gradient: call it on
    gradients, under no_grad, or in the forward or backward of a `Function`. Functional collectives
    of the same names are typed too, and those of `torch.distributed.nn.functional`; with a gradient
    their results are R. Processes do not compare such calls before they begin.

    Args:
        mesh: its mesh.
        axis: an axis name, or several that act as one.

    Raises:
        MeshError: the mesh has no such axis.

    Source: `torch.distributed.device_mesh.DeviceMesh.get_group`.

    Example:
        >>> import torch
        >>> import torch.distributed as dist
        >>> from shardmap_torch import P, axis_group, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> group = axis_group(mesh, "dp")
        >>> @shard_map(mesh=mesh, in_specs=P("dp"), out_specs=P(), check="global")
        ... def total(x):
        ...     y = x.sum(0)
        ...     dist.all_reduce(y, group=group)
        ...     return y
        >>> total(torch.arange(8.0).view(4, 2))
        tensor([12., 16.])
    """
    ANSWERING.begin()
    on = as_mesh(mesh)
    axes = on.in_order(axis)
    return AxisGroup(on, axes) if on.device_mesh is None else on.group(axes)

"""Mesh: a grid of ranks, how they run, and the process groups along its axes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from math import prod
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.control.groups import destroy_groups, make_group, shortest_timeout
from shardmap_torch.control.start import current
from shardmap_torch.control.waiting import within
from shardmap_torch.core.ambient import SCOPES
from shardmap_torch.core.caching import Memo
from shardmap_torch.errors import MeshError, show


class Count(int):
    """A number of ranks that a body asks its mesh for, while it runs for other ones.

    The body loops and reshapes by the number. Tensors are multiplied and divided by the other one,
    as by `axis_size`: so a mean that is divided once more is none on one device.
    """

    here: int

    @staticmethod
    def of(size: int, here: int) -> int:
        """Returns the size of a mesh, of which the ranks that the body runs for are another one."""
        count = Count(size)
        count.here = here
        return count

    def __rtruediv__(self, other: float) -> float:
        return other / self.here


class Grid:
    """The layout of a mesh: its axes, and the place of each rank on them.

    Attributes:
        axis_names: one name per axis, major first.
        axis_sizes: ranks along each axis.
        aliases: names that stand for several axes, the first of them major.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    aliases: tuple[tuple[str, tuple[str, ...]], ...]
    _sizes: dict[str, int]

    @property
    def shape(self) -> Mapping[str, int]:
        """Mapping of axis names to axis sizes, in order, and then of those of views.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> make_mesh((2, 4), ("dp", "tp"), kind="simulated").shape["tp"]
            4
        """
        # Made again: Dynamo traces a proxy of a dict that it has seen made, and of no other.
        sizes, own = dict(zip(self.axis_names, self.axis_sizes, strict=True)), self._of_body()
        if self.aliases:
            sizes.update(self._sizes)
        if own is not None:
            sizes = {axis: Count.of(size, own._sizes[axis]) for axis, size in sizes.items()}
        return MappingProxyType(sizes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        own, size = self._of_body(), prod(self.axis_sizes)
        return size if own is None else Count.of(size, own.size)

    def _of_body(self) -> "Grid | None":
        """Returns the mesh that stands for this one in the body that runs, if another one does."""
        scope = SCOPES.stack[-1] if SCOPES.stack else None
        own: Any = None if scope is None else scope.backend.mesh
        return None if own is None or own.full is None or own.full != self else own

    def num_ranks(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along several axes together."""
        sizes = self._sizes
        if len(axes) == 1:
            return sizes[axes[0]]
        return prod([sizes[axis] for axis in axes])

    def finest(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Replaces axes of views by the finest axes that make them up; leaves other names alone.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> views = [{"edp": 2, "ep": 4}]
            >>> mesh = make_mesh((4, 2), ("dp", "cp"), kind="simulated", views=views)
            >>> mesh.finest(["ep"])
            ('dp&ep', 'cp')
        """
        if not self.aliases:
            return tuple(axes)
        aliases = dict(self.aliases)
        return tuple(part for axis in axes for part in aliases.get(axis, (axis,)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of `rank` on each axis.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> make_mesh((2, 4), ("dp", "tp"), kind="simulated").coordinates(5)
            {'dp': 1, 'tp': 1}
        """
        place: dict[str, int] = {}
        for axis, size in zip(reversed(self.axis_names), reversed(self.axis_sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axis_names}

    def rank_at(self, place: Mapping[str, int]) -> int:
        """Returns the rank at these coordinates; inverse of `coordinates`."""
        rank = 0
        for axis, size in zip(self.axis_names, self.axis_sizes, strict=True):
            rank = rank * size + place[axis]
        return rank

    def index(self, axes: Sequence[str], place: Mapping[str, int]) -> int:
        """Returns the position along several axes together, the first of them major."""
        sizes, index = self._sizes, 0
        for axis in self.finest(axes) if self.aliases else axes:
            index = index * sizes[axis] + place[axis]
        return index

    def peers(self, axes: Sequence[str], place: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the ranks that differ from `place` along `axes` only, in the order of `index`."""
        places = [dict(place)]
        for axis in self.finest(axes):
            places = [{**p, axis: i} for p in places for i in range(self.shape[axis])]
        return tuple(self.rank_at(p) for p in places)

    def in_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the finest axes of `axes` in the order of the mesh.

        Raises:
            MeshError: the mesh lacks one of them.
        """
        finest = self.finest((axes,) if isinstance(axes, str) else axes)
        unknown = [axis for axis in finest if axis not in self.axis_names]
        if unknown or not finest:
            raise MeshError(f"No axes {show(axes)} in the {self}.")
        return tuple(axis for axis in self.axis_names if axis in finest)


Kind: TypeAlias = Literal["simulated", "process_group", "abstract"]
PROCESS_KINDS: Final[frozenset[Kind]] = frozenset({"process_group"})
"""The kinds whose ranks are processes, which have groups and must agree on each call."""

Strategy: TypeAlias = Literal["auto", "vmap", "ranks"]

Debug: TypeAlias = Literal["collectives"]


@dataclass
class _State:
    """The mutable state of a mesh, whose groups may be closed and made again.

    Attributes:
        closed: whether `close` has been called.
        name: of its groups, in common with other ranks.
        epoch: number of recoveries of the run before its groups were made.
        remade: whether its groups differ from those of the DeviceMesh it was made with.
        own: the groups that were made for it.
        backend: runs collectives over its groups; holds the mesh, as those that follow do.
        sharing: cached backends of bodies with automatic axes, by these.
        specs: cached DTensorSpecs, which hold its DeviceMesh.
        crossings: cached boundaries of calls.
    """

    closed: bool = False
    name: str = ""
    epoch: int = 0
    remade: bool = False
    own: list[dist.ProcessGroup] = field(default_factory=list)
    backend: Any = None
    sharing: Memo[Any] = field(default_factory=Memo)
    specs: Memo[Any] = field(default_factory=Memo)
    crossings: WeakSet[Any] = field(default_factory=WeakSet)

    def drop(self) -> None:
        """Drops the references of caches to the mesh."""
        self.backend, self.sharing = None, Memo()
        for crossing in list(self.crossings):
            crossing.close()


MAX_RANKS: Final = 2**20
"""Maximal number of ranks: code of Python counts them, and one number each has to fit in memory."""


@dataclass(frozen=True)
class Mesh(Grid):
    """Ranks laid out in a grid whose axes have names; rank numbers run row-major.

    Made by `make_mesh`. Equal to another mesh of the same layout, kind and device.

    A mesh with views has the finest axes from which those of all its views are made, and the names
    of the others stand for several of these; see `make_mesh`.

    Attributes:
        axis_names: one name per axis, major first.
        axis_sizes: ranks along each axis.
        kind: how its ranks run; see `make_mesh`.
        device: device of the values; None takes any one device that the inputs share.
        simulate: the strategy of a simulated mesh.
        device_mesh: torch's mesh underneath; process-group meshes only.
        debug: "collectives" compares every collective on all ranks before it begins.
        aliases: names that stand for several axes, the first of them major.
        layout: an equal mesh without groups, which caches may keep; None if it has none itself.
        inner: the mesh that calls on this one use, of the same groups. Caches keep that, and drop
            it when this one is freed.
        processes: the processes that are its ranks, in order, where it is a slice of a DeviceMesh;
            empty where they are all, numbered as the ranks are.
        full: the mesh whose axes have other sizes here, for a comparison.

    Source: `jax.sharding.Mesh`, `torch.distributed.device_mesh.DeviceMesh`.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    kind: Kind
    device: torch.device | None = None
    simulate: Strategy = "auto"
    device_mesh: DeviceMesh | None = field(default=None, compare=False, repr=False)
    debug: Debug | None = field(default=None, compare=False, repr=False)
    aliases: tuple[tuple[str, tuple[str, ...]], ...] = ()
    layout: "Mesh | None" = field(default=None, compare=False, repr=False)
    inner: "Mesh | None" = field(default=None, compare=False, repr=False)
    processes: tuple[int, ...] = field(default=(), compare=False, repr=False)
    full: "Mesh | None" = field(default=None, compare=False, repr=False)
    _groups: dict[Any, dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False, init=False
    )
    _state: _State = field(default_factory=_State, compare=False, repr=False, init=False)
    _sizes: dict[str, int] = field(default_factory=dict, compare=False, repr=False, init=False)

    def __post_init__(self) -> None:
        """Stores the sizes by name, which each call of a collective reads."""
        sizes, given = self._sizes, (self.axis_names, self.axis_sizes)
        if not all(isinstance(each, tuple) for each in given) or len({*map(len, given)}) > 1:
            raise MeshError(
                f"A Mesh has a tuple of names and one of as many sizes, not {show(given[0])} and "
                f"{show(given[1])}; make one with make_mesh."
            )
        if bool in map(type, self.axis_sizes) or self.size > MAX_RANKS:
            raise MeshError(f"A mesh has up to {MAX_RANKS:,} ranks, not {show(self.axis_sizes)}.")
        sizes.update(zip(self.axis_names, self.axis_sizes, strict=True))
        sizes.update({name: prod(sizes[axis] for axis in axes) for name, axes in self.aliases})

    def __hash__(self) -> int:
        """Hashes the layout only, which costs each call a fifth of hashing all that is compared."""
        return hash((self.axis_names, self.axis_sizes))

    @property
    def rank(self) -> int:
        """The rank of this process on the mesh; outside of bodies 0 where it holds all ranks.

        In a body it is the rank of the body. A check follows the number: it differs by rank, and so
        does what the body makes of it.

        Raises:
            MeshError: all ranks run the body as one program, as on a batched mesh.

        Source: `jax.process_index`, `torch.distributed.get_rank`.
        """
        scope = SCOPES.stack[-1] if SCOPES.stack else None
        rank: int | None = None if scope is None else scope.backend.rank_along(self.axis_names)
        if rank is None and self.device_mesh is not None:
            process = dist.get_rank()
            return self.processes.index(process) if self.processes else process
        if rank is None and scope is not None and self.size > 1:
            raise MeshError(
                f"mesh.rank is asked for in a body on the {self}, where all ranks run as one "
                "program. Use axis_index(axis), a tensor that varies; ask outside of the body "
                "which process prints."
            )
        return 0 if rank is None else rank

    def processes_of(self, ranks: Sequence[int]) -> list[int]:
        """Returns the numbers that torch.distributed has for ranks of this mesh."""
        return [self.processes[rank] for rank in ranks] if self.processes else list(ranks)

    def resized(self, sizes: tuple[int, ...]) -> "Mesh":
        """Returns an abstract mesh of other sizes, whose axes have the same process groups."""
        mesh = Mesh(
            self.axis_names,
            sizes,
            "abstract",
            self.device,
            device_mesh=self.device_mesh,
            aliases=self.aliases,
            full=self.full or self,
        )
        mesh._groups.update(self._groups)
        return mesh

    def group(self, axes: Sequence[str], purpose: str = "collectives") -> dist.ProcessGroup:
        """Returns the process group along `axes`; its members are in mesh order.

        One group per set of axes and purpose. The group of one axis exists already; others are
        made at first use, which each member must reach, as it does when all ranks run one program.

        Raises:
            MeshError: the mesh has no process groups.
        """
        if self.device_mesh is None:
            raise MeshError(f"A {self.kind} mesh has no process groups.")
        if self._state.closed:
            raise MeshError(f"The {self} is closed; make another with make_mesh.")
        ordered = self.in_order(axes)
        key = (ordered, purpose)
        if key not in self._groups:
            self._groups[key] = self._make_group(self.device_mesh, ordered, purpose)
        return self._groups[key]

    def _make_group(
        self, device_mesh: DeviceMesh, axes: tuple[str, ...], purpose: str
    ) -> dist.ProcessGroup:
        if len(axes) == 1 and purpose == "collectives" and not self._state.remade:
            return device_mesh.get_group(axes[0])
        named = (dist.group.WORLD, *map(device_mesh.get_group, axes))
        limit = shortest_timeout([group for group in named if group is not None])
        return self.make_group(axes, purpose, limit, self.rank)

    def make_group(
        self, axes: tuple[str, ...], purpose: str, limit: timedelta | None, rank: int
    ) -> dist.ProcessGroup:
        """Makes the group of a rank of this process along `axes`."""
        if self.kind not in PROCESS_KINDS and self.device_mesh is None:
            raise MeshError(f"A {self.kind} mesh has no process groups.")
        state, members = self._state, self.processes_of(self.peers(axes, self.coordinates(rank)))
        name = f"shardmap {state.name}.{state.epoch} {purpose} {'&'.join(axes)} {members[0]}"
        is_cpu = self.device is not None and self.device.type == "cpu"
        what = f"Making the group of {axes} on the {self}"
        group = make_group(name, members, limit, what, on_thread=is_cpu)
        state.own.append(group)
        return group

    def recover(self) -> None:
        """Recovers from an error of communication: all ranks agree, and make new groups.

        After such an error messages may still be in flight, and every call raises a MeshError.
        Catch the error on all ranks and call this on all of them: it waits for them, at most for
        twice the timeout. Where a process is gone it raises; start the processes again
        then, as `torchrun --max-restarts` does. On a mesh of one process it does nothing.

        Raises:
            CommunicationError: a rank did not come in time; names it.

        Source: `torch.distributed.ProcessGroup.abort` and new groups; ULFM's `MPIX_Comm_shrink`
        (Bland et al. 2013), without the shrinking.
        """
        control = current()
        if control is None or self.device_mesh is None:
            return
        if control.progress.broken or self._state.epoch == control.progress.epoch:
            within(3 * control.timeout, "recover()", control.recover)
        self._forget()
        self._state.own.clear()
        self._state.epoch, self._state.remade = control.progress.epoch, True
        # DTensors on the mesh use the same groups, and torch.compile finds them by their names.
        groups = within(
            control.timeout, "recover()", lambda: [self.group((axis,)) for axis in self.axis_names]
        )
        if hasattr(self.device_mesh, "_dim_group_names"):
            self.device_mesh._dim_group_names = names = [each.group_name for each in groups]
            self.device_mesh._get_root_mesh()._pg_registry.update(zip(names, groups, strict=True))

    def close(self) -> None:
        """Destroys the groups that this mesh has made; it cannot be used any more.

        All ranks must call it. Groups of torch's default and of a DeviceMesh that was passed to
        `make_mesh` stay. A mesh is also a context manager that closes it.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> with make_mesh((2,), ("dp",), kind="simulated") as mesh:
            ...     mesh.size
            2
        """
        self._forget()
        self._state.closed = True
        destroy_groups(self._state.own)

    def _forget(self) -> None:
        self._groups.clear()
        self._state.drop()

    def require_open(self) -> None:
        """Requires that its groups can be used.

        Raises:
            MeshError: it is closed, or its groups were made before a `recover` of another mesh.
        """
        if self._state.closed:
            raise MeshError(f"The {self} is closed; make another with make_mesh.")
        known = None if (control := current()) is None else control.progress
        if known is not None and self._state.epoch != known.epoch and not known.broken:
            raise MeshError(
                f"The {self} has groups of before an error. Call its recover() on all ranks too."
            )

    def __enter__(self) -> "Mesh":
        """Closes the mesh at the end of a `with` block; see `close`."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def __str__(self) -> str:
        """Formats it as `simulated mesh (dp=2, tp=4)`."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        return f"{self.kind} mesh ({sizes})"

"""Named meshes of ranks: simulated, over process groups, or abstract."""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import partial
from math import prod
from types import MappingProxyType
from typing import Any, Literal, TypeAlias, get_args
from weakref import WeakSet, finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.control.groups import (
    TORCHRUN_VARIABLES,
    agree_on_layout,
    bury_groups,
    destroy_groups,
    destroy_unused_groups,
    in_time,
    make_device_mesh,
    read_timeout,
    shortest_timeout,
    start_process_group,
)
from shardmap_torch.control.start import current, within
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.torch_private.engine import set_timeout
from shardmap_torch.core.views import refined
from shardmap_torch.errors import MeshError, show

Kind: TypeAlias = Literal["simulated", "process_group", "abstract"]
Strategy: TypeAlias = Literal["auto", "vmap", "ranks"]

Debug: TypeAlias = Literal["collectives"]


@dataclass
class _State:
    """The mutable state of a mesh, whose groups may be closed and made anew.

    Attributes:
        closed: whether `close` has been called.
        epoch: number of recoveries of the run before its groups were made.
        remade: whether its groups differ from those of the DeviceMesh it was made with.
        own: the groups that were made for it.
        forget: callbacks that drop other references to the groups.
        specs: cached DTensorSpecs, which hold its DeviceMesh.
        crossings: cached boundaries of calls, which hold the mesh.
    """

    closed: bool = False
    epoch: int = 0
    remade: bool = False
    own: list[dist.ProcessGroup] = field(default_factory=list)
    forget: list[Callable[[], object]] = field(default_factory=list)
    specs: Memo[Any] = field(default_factory=Memo)
    crossings: WeakSet[Any] = field(default_factory=WeakSet)

    def drop(self) -> None:
        """Drops the references of caches to the mesh."""
        for forget in self.forget:
            forget()
        self.forget.clear()
        for each in list(self.crossings):
            each.close()


@dataclass(frozen=True)
class Mesh:
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
    _groups: dict[Any, dist.ProcessGroup] = field(
        default_factory=dict, compare=False, repr=False, init=False
    )
    _state: _State = field(default_factory=_State, compare=False, repr=False, init=False)
    _sizes: dict[str, int] = field(default_factory=dict, compare=False, repr=False, init=False)

    def __post_init__(self) -> None:
        """Stores the sizes by name, which each call of a collective reads."""
        sizes = self._sizes
        sizes.update(zip(self.axis_names, self.axis_sizes, strict=True))
        sizes.update({name: prod(sizes[axis] for axis in axes) for name, axes in self.aliases})

    def __hash__(self) -> int:
        """Hashes the layout only, which costs each call a fifth of hashing all that is compared."""
        return hash((self.axis_names, self.axis_sizes))

    @property
    def shape(self) -> Mapping[str, int]:
        """Mapping of axis names to axis sizes, in order, and then of those of views.

        Example:
            >>> make_mesh((2, 4), ("dp", "tp"), kind="simulated").shape["tp"]
            4
        """
        # Made anew: Dynamo traces a proxy of a dict that it has seen made, and of no other.
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        if self.aliases:
            sizes.update(self._sizes)
        return MappingProxyType(sizes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axis_sizes)

    @property
    def rank(self) -> int:
        """The rank of this process; 0 where one process holds all ranks.

        Source: `jax.process_index`, `torch.distributed.get_rank`.
        """
        return dist.get_rank() if self.device_mesh is not None else 0

    def num_ranks(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along several axes together."""
        sizes = self._sizes
        if len(axes) == 1:
            return sizes[axes[0]]
        return prod([sizes[axis] for axis in axes])

    def finest(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Replaces axes of views by those of which they consist; leaves other names alone.

        Example:
            >>> views = [{"edp": 2, "ep": 4}]
            >>> mesh = make_mesh((4, 2), ("dp", "cp"), kind="simulated", views=views)
            >>> mesh.finest(["ep"])
            ('dp&ep', 'cp')
        """
        if not self.aliases:
            return tuple(axes)
        aliases = dict(self.aliases)
        return tuple(each for axis in axes for each in aliases.get(axis, (axis,)))

    def resized(self, sizes: tuple[int, ...]) -> "Mesh":
        """Returns an abstract mesh of other sizes, whose axes have the same process groups."""
        mesh = Mesh(
            self.axis_names,
            sizes,
            "abstract",
            self.device,
            device_mesh=self.device_mesh,
            aliases=self.aliases,
        )
        mesh._groups.update(self._groups)
        return mesh

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of `rank` on each axis.

        Example:
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
        wanted = self.finest((axes,) if isinstance(axes, str) else axes)
        unknown = [axis for axis in wanted if axis not in self.axis_names]
        if unknown or not wanted:
            raise MeshError(f"No axes {show(axes)} in the {self}.")
        return tuple(axis for axis in self.axis_names if axis in wanted)

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
        members = self.peers(axes, self.coordinates(dist.get_rank()))
        named = (dist.group.WORLD, *map(device_mesh.get_group, axes))
        limit = shortest_timeout([group for group in named if group is not None])

        def make() -> dist.ProcessGroup:
            group = dist.new_group(
                list(members),
                timeout=limit,
                use_local_synchronization=True,
                group_desc=f"{axes} {purpose}",
            )
            assert isinstance(group, dist.ProcessGroup)  # this rank is a member
            self._state.own.append(group)
            return group

        if device_mesh.device_type != "cpu":  # the device is one of this thread
            return make()
        return in_time(limit, f"Making the group of {axes} on the {self}", make)

    def recover(self) -> None:
        """Recovers from an error of communication: all ranks agree, and make new groups.

        After such an error messages may still be in flight, and every call raises a MeshError.
        Catch the error on all ranks and call this on all of them: it waits for them, at most for
        twice the timeout. Where a process is gone it raises; start the processes anew
        then, as `torchrun --max-restarts` does. On a mesh of one process it does nothing.

        Raises:
            CommunicationError: a rank did not come in time; names it.

        Source: `torch.distributed.ProcessGroup.abort` and new groups; ULFM's `MPIX_Comm_shrink`
        (Bland et al. 2013), without the shrinking.
        """
        control = current()
        if control is None or self.device_mesh is None:
            return
        if control.broken or self._state.epoch == control.epoch:
            within(3 * control.timeout, "recover()", control.recover)
        self._forget()
        self._state.own.clear()
        self._state.epoch, self._state.remade = control.epoch, True
        # DTensors on the mesh use the same groups.
        names = within(
            control.timeout,
            "recover()",
            lambda: [self.group((axis,)).group_name for axis in self.axis_names],
        )
        if hasattr(self.device_mesh, "_dim_group_names"):
            self.device_mesh._dim_group_names = names

    def close(self) -> None:
        """Destroys the groups that this mesh has made; it cannot be used any more.

        All ranks must call it. Groups of torch's default and of a DeviceMesh that was passed to
        `make_mesh` stay. A mesh is also a context manager that closes it.

        Example:
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

    def when_groups_change(self, forget: Callable[[], object]) -> None:
        """Registers `forget`, to be called once when the groups are closed or made anew."""
        self._state.forget.append(forget)

    def require_open(self) -> None:
        """Requires that its groups can be used.

        Raises:
            MeshError: it is closed, or its groups were made before a `recover` of another mesh.
        """
        control = current()
        if self._state.closed:
            raise MeshError(f"The {self} is closed; make another with make_mesh.")
        if control is not None and self._state.epoch != control.epoch and not control.broken:
            raise MeshError(
                f"The {self} has groups of before an error. Call its recover() on all ranks too."
            )

    def __enter__(self) -> "Mesh":
        """Closes the mesh at the end of a `with` block; see `close`."""
        return self

    def __exit__(self, *error: object) -> None:
        """Closes the mesh."""
        self.close()

    def __str__(self) -> str:
        """Formats it as `simulated mesh (dp=2, tp=4)`."""
        sizes = ", ".join(f"{axis}={size}" for axis, size in self.shape.items())
        return f"{self.kind} mesh ({sizes})"


def make_mesh(
    shape: Sequence[int] | DeviceMesh,
    axis_names: Sequence[str] | None = None,
    *,
    kind: Kind | None = None,
    device: str | torch.device | None = None,
    simulate: Strategy = "auto",
    timeout: float | timedelta | None = None,
    debug: Debug | None = None,
    views: Sequence[Mapping[str, int]] = (),
) -> Mesh:
    """Makes a mesh of `prod(shape)` ranks.

    The same ranks may be seen as several grids: attention as (dp, cp, tp), experts as (edp, ep,
    tp). `views` lists the other grids. The mesh then has the finest axes from which the axes of all
    grids are made, and every name of a grid may be used wherever an axis may: in specs, collectives
    and types, all of them in one body. A value that is sharded over "dp" is sharded over the parts
    of "ep" that are parts of "dp" too. A view whose axes are several of the others is a flattened
    mesh. Printed types and DTensors name the finest axes; a part that is an axis of no grid is
    named by those that it is a part of, as "dp&ep".

    Args:
        shape: ranks along each axis, or a torch DeviceMesh to take over with its groups.
        axis_names: one name per axis; for a DeviceMesh by default its own.
        kind: "simulated" (all ranks in this process), "process_group" (one rank a process) or
            "abstract" (no data). By default "process_group" where torchrun's environment or an
            initialised process group is found, else "simulated".
        device: device of the values. A process-group mesh takes CUDA by default where there is one,
            else the CPU; a simulated mesh takes any device that the inputs share.
        simulate: how a simulated mesh runs. "ranks": one thread a rank, which gives what real ranks
            give. "vmap": one batched program, faster, composes with every torch.func transform;
            its gradients from outside are those that the specs promise, so use it for
            programs known to be right. "auto": "vmap" for a function whose signature the checker
            accepted, or plain code where the mesh has one rank; else "ranks".
        timeout: seconds, or a timedelta: how long a rank of a process-group mesh waits for others
            at most. By default the timeout of torch's process group, 30 minutes on gloo. With one
            axis the group is torch's default group, whose timeout it becomes.
        debug: "collectives" compares every collective on all ranks of a process-group mesh before
            it begins, which costs a round trip each. By default calls are compared, and backwards
            at their first collective.
        views: other grids of the same ranks, each from axis names to sizes, major first; their
            ranks are numbered row-major too.

    On a process-group mesh this starts torch.distributed from torchrun's environment if nothing
    has (gloo on CPU, NCCL on CUDA) and makes one group per axis, so every rank must call it.

    Raises:
        MeshError: sizes, names, views, world size or environment do not match.
        CollectiveMismatchError: the processes make different meshes.
        CommunicationError: a process did not come in time.

    Source: `jax.make_mesh`, `torch.distributed.device_mesh.init_device_mesh`; views: the role of
    `reinterpret_mesh` in spmd_types, `DeviceMesh._flatten` and `_unflatten`.

    Example:
        >>> print(make_mesh((2, 4), ("dp", "tp"), kind="simulated"))
        simulated mesh (dp=2, tp=4)
        >>> print(make_mesh((4, 2), ("dp", "cp"), kind="simulated", views=[{"edp": 2, "ep": 4}]))
        simulated mesh (edp=2, dp&ep=2, cp=2, dp=4, ep=4)
    """
    if not isinstance(simulate, str) or simulate not in get_args(Strategy):
        raise MeshError(f"simulate={show(simulate)} is none of {', '.join(get_args(Strategy))}.")
    if debug is not None and (not isinstance(debug, str) or debug not in get_args(Debug)):
        raise MeshError(f"debug={show(debug)} is neither None nor 'collectives'.")
    limit = read_timeout(timeout)
    if isinstance(shape, DeviceMesh):
        if views:
            raise MeshError("A DeviceMesh has no views; pass sizes and names to make_mesh.")
        return _from_device_mesh(shape, axis_names, simulate, limit, debug)
    names, sizes, aliases = _with_views(*_check_layout(shape, axis_names), views)
    kind = kind if kind is not None else _default_kind()
    if not isinstance(kind, str) or kind not in get_args(Kind):
        raise MeshError(f"kind={show(kind)} is none of {', '.join(get_args(Kind))}.")
    chosen = _read_device(device)
    if kind != "process_group":
        return Mesh(names, sizes, kind, chosen, simulate, aliases=aliases)
    chosen = start_process_group(chosen, limit)
    agree_on_layout(names, sizes, limit)
    destroy_unused_groups()
    device_mesh = make_device_mesh(chosen, names, sizes, limit)
    layout = Mesh(names, sizes, kind, chosen, simulate, None, debug, aliases)
    mesh = replace(layout, device_mesh=device_mesh, layout=layout)
    handle = _with_groups(mesh, limit)
    own = [group for group in mesh._groups.values() if group is not dist.group.WORLD]
    mesh._state.own.extend(own)
    return handle


def _with_views(
    names: tuple[str, ...], sizes: tuple[int, ...], views: Sequence[Mapping[str, int]]
) -> tuple[tuple[str, ...], tuple[int, ...], tuple[tuple[str, tuple[str, ...]], ...]]:
    """Finds the finest axes of all grids, their sizes, and what the other names stand for."""
    if not views:
        return names, sizes, ()
    if isinstance(views, str | Mapping) or not isinstance(views, Sequence):
        raise MeshError(
            f"views must be a sequence of dicts from names to sizes, not {show(views)}."
        )
    for view in views:
        if not isinstance(view, Mapping):
            raise MeshError(f"A view must be a dict from names to sizes, not {show(view)}.")
        _check_layout(tuple(view.values()), tuple(view))
        if prod(view.values()) != prod(sizes):
            raise MeshError(
                f"The view {show(dict(view))} has {prod(view.values())} ranks, and the mesh "
                f"{prod(sizes)}."
            )
    axes, made = refined([dict(zip(names, sizes, strict=True)), *views])
    return tuple(axes), tuple(axes.values()), tuple(made.items())


def _with_groups(mesh: Mesh, limit: timedelta | None) -> Mesh:
    """Makes the groups of a mesh's axes, with the timeout of the default group."""
    world = dist.group.WORLD
    assert world is not None  # it has been initialised
    patience = limit or shortest_timeout([world])
    for axis in mesh.axis_names:
        group = mesh.group((axis,))
        if patience is not None and dist.get_backend(group) in ("gloo", "nccl"):
            set_timeout(patience, group)
    control = current()
    mesh._state.epoch = control.epoch if control is not None else 0
    return _with_handle(mesh)


def _with_handle(inner: Mesh) -> Mesh:
    """Returns what the user holds of a mesh; caches drop the mesh when that is freed.

    Its groups are destroyed when another mesh is made, where all ranks meet, once nothing has the
    mesh or its DeviceMesh any more: a graph, or a DTensor.
    """
    handle = replace(inner, inner=inner)
    for name in ("_groups", "_state"):
        object.__setattr__(handle, name, getattr(inner, name))
    finalize(handle, inner._state.drop).atexit = False
    assert inner.device_mesh is not None  # only process-group meshes come here
    bury = partial(bury_groups, inner._state.own, ref(inner.device_mesh))
    finalize(inner._state, bury).atexit = False
    return handle


def _read_device(device: str | torch.device | None) -> torch.device | None:
    try:
        return None if device is None else torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise MeshError(f"device={show(device)} is no device of torch.") from error


def _check_layout(
    shape: Sequence[int], axis_names: Sequence[str] | None
) -> tuple[tuple[str, ...], tuple[int, ...]]:
    if not isinstance(shape, Sequence):
        raise MeshError(f"shape must be a sequence of sizes or a DeviceMesh, not {show(shape)}.")
    if isinstance(axis_names, str) or not isinstance(axis_names, Sequence):
        raise MeshError(f"axis_names must be a sequence of names, not {show(axis_names)}.")
    names, sizes = tuple(axis_names), tuple(shape)
    if len(names) != len(sizes):
        raise MeshError(
            f"{len(sizes)} sizes {show(sizes)} but {len(names)} axis names {show(names)}."
        )
    if not names:
        raise MeshError("A mesh needs at least one axis; use size 1 for a single rank.")
    bad_names = [name for name in names if not (isinstance(name, str) and name)]
    if bad_names or len(set(names)) < len(names):
        raise MeshError(f"Axis names must be different non-empty strings, not {show(names)}.")
    if not all(isinstance(size, int) and size >= 1 for size in sizes):
        raise MeshError(f"Axis sizes must be integers of at least 1, not {show(sizes)}.")
    return names, sizes


def _default_kind() -> Kind:
    started = dist.is_available() and dist.is_initialized()
    torchrun = all(variable in os.environ for variable in TORCHRUN_VARIABLES)
    return "process_group" if started or torchrun else "simulated"


def _from_device_mesh(
    device_mesh: DeviceMesh,
    axis_names: Sequence[str] | None,
    simulate: Strategy,
    limit: timedelta | None,
    debug: Debug | None,
) -> Mesh:
    own = device_mesh.mesh_dim_names
    if own is None:
        raise MeshError("The DeviceMesh has no dim names; make it with mesh_dim_names=(...).")
    if axis_names is not None and tuple(axis_names) != tuple(own):
        raise MeshError(f"axis_names {tuple(axis_names)} differ from the DeviceMesh's {own}.")
    sizes = tuple(device_mesh.shape)
    _check_layout(sizes, own)
    if device_mesh.size() != dist.get_world_size():
        raise MeshError(
            f"The DeviceMesh {dict(zip(own, sizes, strict=True))} has not all of the "
            f"{dist.get_world_size()} processes. Pass the mesh that it is a part of, and name axes "
            f"where they are needed: parallelize(module, mesh, plan, axis={own[0]!r})."
        )
    agree_on_layout(tuple(own), sizes, limit)
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise MeshError(f"The DeviceMesh's ranks {ranks} are not in row-major order.")
    device = torch.device(device_mesh.device_type)
    layout = Mesh(tuple(own), sizes, "process_group", device, simulate, None, debug)
    mesh = replace(layout, device_mesh=device_mesh, layout=layout)
    return _with_groups(mesh, limit)


class _Ambient(threading.local):
    """The meshes that `use_mesh` has entered on this thread, innermost last."""

    def __init__(self) -> None:
        self.meshes: list[Mesh] = []


_AMBIENT = _Ambient()


@contextmanager
def use_mesh(mesh: Mesh | DeviceMesh) -> Iterator[Mesh]:
    """Makes `mesh` the default of `shard_map`, `device_put` and `from_local` on this thread.

    Source: `jax.sharding.use_mesh`.

    Example:
        >>> with use_mesh(make_mesh((2,), ("dp",), kind="simulated")) as mesh:
        ...     print(current_mesh())
        simulated mesh (dp=2)
    """
    entered = mesh if isinstance(mesh, Mesh) else as_mesh(mesh)
    _AMBIENT.meshes.append(entered)
    try:
        yield entered
    finally:
        _AMBIENT.meshes.pop()


def current_mesh() -> Mesh | None:
    """Returns the mesh of the innermost `use_mesh` on this thread, or None."""
    return _AMBIENT.meshes[-1] if _AMBIENT.meshes else None


_FROM_DEVICE_MESH: dict[int, Mesh] = {}


def as_mesh(mesh: Mesh | DeviceMesh | None) -> Mesh:
    """Converts a DeviceMesh to a Mesh; returns the current mesh for None.

    Raises:
        MeshError: there is none, or it is no mesh.
    """
    if isinstance(mesh, Mesh):
        return mesh if mesh.inner is None else mesh.inner
    if isinstance(mesh, DeviceMesh):
        known = _FROM_DEVICE_MESH.get(id(mesh))
        if known is None or known.device_mesh is not mesh:
            known = _FROM_DEVICE_MESH[id(mesh)] = make_mesh(mesh)
        return as_mesh(known)
    if mesh is not None:
        raise MeshError(f"A mesh is made by make_mesh or is a DeviceMesh, not {show(mesh)}.")
    current = current_mesh()
    if current is None:
        raise MeshError("No mesh: pass mesh=..., or enter one with `with use_mesh(mesh):`.")
    return as_mesh(current)

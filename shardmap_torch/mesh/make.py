"""Makes meshes of layouts, views and DeviceMeshes; keeps the default one."""

import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from math import prod
from typing import Final, get_args
from weakref import finalize, ref

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.control.groups import (
    TORCHRUN_VARIABLES,
    agree_on_layout,
    bury_groups,
    destroy_unused_groups,
    read_timeout,
    shortest_timeout,
    start_process_group,
)
from shardmap_torch.control.start import current, pass_on_uncaught_errors
from shardmap_torch.core.ambient import ThreadStack
from shardmap_torch.core.torch_private.engine import set_timeout
from shardmap_torch.core.views import refined
from shardmap_torch.errors import MeshError, show
from shardmap_torch.mesh.mesh import PROCESS_KINDS, Debug, Kind, Mesh, Strategy


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
        shape: ranks along each axis, or a torch DeviceMesh to take over with its groups. That may
            be a slice, `device_mesh["tp"]`, of which each process takes its own: all of them run
            the same programs, and what the slices exchange is not this library's affair.
        axis_names: one name per axis; for a DeviceMesh by default its own.
        kind: "simulated" (all ranks in this process), "process_group" (one rank a process) or
            "abstract" (no data). By default "process_group" where torchrun's environment or an
            initialised process group is found, else "simulated".
        device: device of the values. A process-group mesh takes CUDA by default where there is one,
            else the CPU; a simulated mesh takes any device that the inputs share.
        simulate: how a simulated mesh runs. "ranks": one thread a rank, which gives what real ranks
            give. "vmap": one batched program, faster, composes with every torch.func transform;
            what it cannot run of a checked body is an error, and unchecked ones run as ranks.
            "auto": "vmap" for a body that was checked and can be batched, or plain code where the
            mesh has one rank; else "ranks".
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
        MeshError: sizes, names, views, world size or environment do not match; there are more than
            1,048,576 ranks, of an abstract mesh too.
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
    if kind not in PROCESS_KINDS:
        pass_on_uncaught_errors()
        return Mesh(names, sizes, kind, chosen, simulate, aliases=aliases)
    chosen = start_process_group(chosen, limit)
    name = agree_on_layout(names, sizes, limit)
    destroy_unused_groups()
    layout = Mesh(names, sizes, kind, chosen, simulate, None, debug, aliases)
    mesh = replace(layout, device_mesh=_device_mesh(layout, name, limit), layout=layout)
    mesh._state.own.extend(layout._state.own)
    return _with_groups(mesh, limit, name)


def _device_mesh(layout: Mesh, name: str, limit: timedelta | None) -> DeviceMesh:
    """Makes a group for each axis, and torch's mesh of them."""
    world = dist.group.WORLD
    assert world is not None  # it has been initialised
    assert layout.device is not None  # it has been chosen
    layout._state.name, rank = f"axes of {name}", dist.get_rank()
    patience = limit or shortest_timeout([world])
    control = current()
    # Before a recovery a rank may have sent what no other has taken, and never will.
    is_clean = control is None or control.progress.epoch == 0
    groups = [
        world
        if size == layout.size and is_clean
        else layout.make_group((axis,), "collectives", patience, rank)
        for axis, size in layout.shape.items()
        if axis in layout.axis_names
    ]
    ranks = torch.arange(layout.size, device="cpu").view(layout.axis_sizes)
    names = layout.axis_names
    if len(groups) == 1:
        return DeviceMesh.from_group(groups[0], layout.device.type, mesh_dim_names=names)
    return DeviceMesh.from_group(groups, layout.device.type, ranks, mesh_dim_names=names)


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
    axes, aliases = refined([dict(zip(names, sizes, strict=True)), *views])
    return tuple(axes), tuple(axes.values()), tuple(aliases.items())


def _with_groups(mesh: Mesh, limit: timedelta | None, name: str) -> Mesh:
    """Makes the groups of a mesh's axes, with the timeout of the default group."""
    mesh._state.name = name
    world = dist.group.WORLD
    assert world is not None  # it has been initialised
    patience = limit or shortest_timeout([world])
    for axis in mesh.axis_names:
        group = mesh.group((axis,))
        if patience is not None and dist.get_backend(group) in ("gloo", "nccl"):
            set_timeout(patience, group)
    control = current()
    mesh._state.epoch = control.progress.epoch if control is not None else 0
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
    ranks = device_mesh.mesh.flatten().tolist()
    if ranks != sorted(ranks):
        raise MeshError(f"The DeviceMesh's ranks {ranks} are not in row-major order.")
    is_slice = len(ranks) < dist.get_world_size()
    name = agree_on_layout(tuple(own), sizes, limit, is_slice=is_slice)
    if dist.get_rank() not in ranks:
        raise MeshError(f"The DeviceMesh has the processes {ranks}, not {dist.get_rank()}.")
    device = torch.device(device_mesh.device_type)
    layout = Mesh(tuple(own), sizes, "process_group", device, simulate, None, debug)
    processes = tuple(ranks) if is_slice else ()
    mesh = replace(layout, device_mesh=device_mesh, layout=layout, processes=processes)
    return _with_groups(mesh, limit, name)


_AMBIENT: Final[ThreadStack[Mesh]] = ThreadStack()
"""The meshes that `use_mesh` has entered on this thread."""


@contextmanager
def use_mesh(mesh: Mesh | DeviceMesh) -> Iterator[Mesh]:
    """Makes `mesh` the default of `shard_map`, `device_put` and `from_local` on this thread.

    Raises a MeshError if it is none. Source: `jax.sharding.use_mesh`.

    Example:
        >>> from shardmap_torch import current_mesh, make_mesh
        >>> with use_mesh(make_mesh((2,), ("dp",), kind="simulated")) as mesh:
        ...     print(current_mesh())
        simulated mesh (dp=2)
    """
    with _AMBIENT.holding(mesh if isinstance(mesh, Mesh) else as_mesh(mesh)) as entered:
        yield entered


def current_mesh() -> Mesh | None:
    """Returns the mesh of the innermost `use_mesh` on this thread, or None.

    Source: `jax.sharding.get_mesh`.

    Example:
        >>> from shardmap_torch import make_mesh, use_mesh
        >>> with use_mesh(make_mesh((2,), ("dp",), kind="simulated")):
        ...     print(current_mesh())
        simulated mesh (dp=2)
    """
    return _AMBIENT.top


_FROM_DEVICE_MESH: dict[int, Mesh] = {}


def as_mesh(mesh: Mesh | DeviceMesh | None) -> Mesh:
    """Converts a DeviceMesh to a Mesh; returns the current mesh for None.

    Raises:
        MeshError: there is none, or it is no mesh.
    """
    if type(mesh) is Mesh:  # no mock, which says that it is one
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

"""The mesh that calls use by default, and DeviceMeshes read as meshes."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from torch.distributed.device_mesh import DeviceMesh

from shardmap_torch.errors import MeshError, show
from shardmap_torch.mesh.make import make_mesh
from shardmap_torch.mesh.mesh import Mesh


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
    """Returns the mesh of the innermost `use_mesh` on this thread, or None.

    Source: `jax.sharding.get_mesh`.

    Example:
        >>> from shardmap_torch import make_mesh, use_mesh
        >>> with use_mesh(make_mesh((2,), ("dp",), kind="simulated")):
        ...     print(current_mesh())
        simulated mesh (dp=2)
    """
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

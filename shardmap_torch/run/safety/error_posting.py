"""Runs a call on processes, and posts its error for the ranks that wait for it."""

from collections.abc import Callable
from typing import TypeVar

from shardmap_torch.control.start import current
from shardmap_torch.errors import KernelError
from shardmap_torch.mesh import Mesh

T = TypeVar("T")


def posting_errors(mesh: Mesh, name: str, run: Callable[[], T]) -> T:
    """Runs a call of the function `name` on a mesh of processes.

    Raises:
        MeshError: the mesh is closed, or broken since an error.
        CollectiveMismatchError: the other ranks make another call.
    """
    mesh.require_open()
    control = current()
    if control is None:
        return run()
    control.begin_call(name)
    try:
        result = run()
    except BaseException as error:
        if isinstance(error, KernelError) and isinstance(error.__cause__, RuntimeError):
            control.fail_quietly(error)  # a transfer has failed, and others may be in flight
        control.end_call(error)
        raise
    control.end_call()
    return result

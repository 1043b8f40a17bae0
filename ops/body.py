"""Queries of the body that runs: this rank's index, sizes of axes, the mesh, types."""

from torch import Tensor

from shardmap_torch.collectives.protocol import is_checker
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.arguments import Axis, finest, read_axes
from shardmap_torch.types import AxisType


def mesh_of_body() -> Mesh | None:
    """Returns the mesh of the body that runs on this thread; None outside of any."""
    scope = current_scope()
    return None if scope is None else scope.backend.mesh


def is_checking() -> bool:
    """Returns whether the body is being checked, on tensors without values."""
    scope = current_scope()
    return scope is not None and is_checker(scope.backend)


def types_of(x: Tensor, axes: tuple[str, ...] | None = None) -> tuple[AxisType, ...] | None:
    """Returns the types of `x` that the checker found, along all bound axes or these.

    None outside of a body, or in one that is not checked. It is a step of the program, so that runs
    get what the check has found.
    """
    scope = current_scope()
    if scope is None:
        return None
    return scope.types_of(tuple(sorted(scope.axes)) if axes is None else finest(axes), x)


def axis_index(axis: Axis) -> Tensor:
    """Returns this rank's index along `axis`: an int64 scalar tensor of type V.

    A tensor and never a Python int, so that ranks cannot branch differently on it. Over several
    axes the first is major. Communicates nothing.

    Raises:
        CollectiveError: outside a body, or unknown axis.

    Source: `jax.lax.axis_index`.

    Example:
        >>> from shardmap_torch import P, axis_index, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("tp",), kind="simulated")
        >>> f = lambda: axis_index("tp").reshape(1)
        >>> shard_map(f, mesh=mesh, in_specs=(), out_specs=P("tp"))()
        tensor([0, 1, 2, 3])
    """
    axes, scope = read_axes("axis_index", axis)
    scope.on_operation(("axis_index", axes))
    return scope.backend.index(axes)


def axis_size(axis: Axis) -> int:
    """Returns the number of ranks along `axis`, or several together, an int; sends nothing.

    Raises:
        CollectiveError: outside a body, or unknown axis.

    Source: `jax.lax.axis_size`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, axis_size, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("tp",), kind="simulated")
        >>> f = lambda x: x / axis_size("tp")
        >>> shard_map(f, mesh=mesh, in_specs=(P("tp"),), out_specs=P("tp"))(torch.ones(4))
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """
    axes, scope = read_axes("axis_size", axis)
    return scope.backend.mesh.num_ranks(axes)

"""Queries of an axis: this rank's index along it, and its size."""

from torch import Tensor

from shardmap_torch.ops.arguments import Axis, read_axes


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
    """Returns the number of ranks along `axis`, or along several together, as a Python int.

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

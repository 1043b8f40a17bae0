"""Splits global tensors into the shards of all ranks at once, and joins them again.

Both are plain differentiable tensor operations, the only ones that simulated meshes need at the
boundary. Local values have one leading dim per axis.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch.core.modes import without_autocast
from shardmap_torch.errors import SpecError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P


def split(x: Tensor, spec: P, mesh: Mesh) -> tuple[Tensor, tuple[str, ...]]:
    """Shards `x` over the axes that `spec` mentions; over a partial axis the first rank gets it.

    Returns:
        The shards, with one leading dim per such axis, and these axes in mesh order.

    Example:
        >>> from shardmap_torch import make_mesh
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> shards, axes = split(torch.arange(4), P("tp"), mesh)
        >>> shards, axes
        (tensor([[0, 1],
                [2, 3]]), ('tp',))
    """
    leading: list[str] = []
    for dim, axes in reversed(spec.sharded_dims):
        at = dim + len(leading)
        sizes = [mesh.shape[axis] for axis in axes]
        x = x.unflatten(at, (*sizes, x.shape[at] // mesh.num_ranks(axes)))
        if at:
            x = x.movedim(tuple(range(at, at + len(axes))), tuple(range(len(axes))))
        leading = [*axes, *leading]
    for axis in sorted(spec.partial):
        x = torch.cat([x.unsqueeze(0), x.new_zeros((mesh.shape[axis] - 1, *x.shape))])
        leading = [axis, *leading]
    if len(leading) < 2:
        return x.view_as(x) if not leading else x, tuple(leading)
    order = [axis for axis in mesh.axis_names if axis in leading]
    return x.movedim([leading.index(a) for a in order], list(range(len(order)))), tuple(order)


def join(stacked: Tensor, spec: P, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """Joins local values; inverse of `split` for the axes `axes` of the leading dims.

    Takes the first rank's value over an axis that `spec` does not mention; sums over a partial one.
    """
    rest = list(axes)
    for axis in axes:
        if axis in spec.mentioned:
            continue
        at = rest.index(axis)
        partial = axis in spec.partial
        stacked = _add(stacked, at) if partial else stacked.select(at, 0)
        rest.remove(axis)
    for dim, names in spec.sharded_dims:
        # Axes of earlier dims have been merged; the remaining leading dims come before `dim`.
        at = len(rest) - len(names) + dim
        stacked = stacked.movedim([rest.index(a) for a in names], list(range(at, at + len(names))))
        stacked = stacked.flatten(at, at + len(names))
        rest = [axis for axis in rest if axis not in names]
    return stacked


def _add(stacked: Tensor, dim: int) -> Tensor:
    try:
        return stacked.sum(dim, dtype=stacked.dtype)
    except NotImplementedError:  # torch's unsigned integers and floats of eight bits
        raise SpecError(
            f"A result that is a sum over ranks has dtype {stacked.dtype}, which torch cannot add; "
            "convert it in the body."
        ) from None


def stack_cotangent(grad: Tensor, spec: P, mesh: Mesh) -> Tensor:
    """Returns the cotangents of `join`: `[*axis sizes, *local]`, equal on axes not mentioned."""
    shards, order = split(grad, spec, mesh)
    for position, axis in enumerate(mesh.axis_names):
        if axis not in order:
            shards = shards.unsqueeze(position)
    return shards.expand(*mesh.axis_sizes, *shards.shape[len(mesh.axis_names) :])


def locals_of(x: Tensor, spec: P, mesh: Mesh) -> list[Tensor]:
    """Returns each rank's shard of a global tensor, by rank, as views where possible."""
    return list(stack_cotangent(x, spec, mesh).flatten(0, len(mesh.axis_names) - 1).unbind(0))


def global_of(values: Sequence[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """Joins all ranks' values, given by rank, into the global tensor."""
    with without_autocast():
        stacked = torch.stack(list(values)).unflatten(0, mesh.axis_sizes)
    return join(stacked, spec, mesh, mesh.axis_names)

"""Cutting global tensors into the local values of all ranks at once, and putting them together.

Both are plain differentiable tensor operations, the only ones that simulated meshes need at the
boundary. Local values stand behind leading dims, one per axis.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch.core.autocasting import without_autocast
from shardmap_torch.errors import SpecError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P


def cut(x: Tensor, spec: P, mesh: Mesh) -> tuple[Tensor, tuple[str, ...]]:
    """Cuts `x` along the axes that `spec` mentions, and gives it to the first of partial ones.

    Returns:
        The pieces behind one leading dim per such axis, and these axes in mesh order.

    Example:
        >>> from shardmap_torch import make_mesh
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> pieces, axes = cut(torch.arange(4), P("tp"), mesh)
        >>> pieces, axes
        (tensor([[0, 1],
                [2, 3]]), ('tp',))
    """
    found: list[str] = []
    for dim, axes in reversed(spec.sharded_dims):
        at = dim + len(found)
        sizes = [mesh.shape[axis] for axis in axes]
        x = x.unflatten(at, (*sizes, x.shape[at] // mesh.num_ranks(axes)))
        x = x.movedim(tuple(range(at, at + len(axes))), tuple(range(len(axes))))
        found = [*axes, *found]
    for axis in sorted(spec.partial):
        x = torch.cat([x.unsqueeze(0), x.new_zeros((mesh.shape[axis] - 1, *x.shape))])
        found = [axis, *found]
    order = [axis for axis in mesh.axis_names if axis in found]
    return x.movedim([found.index(a) for a in order], list(range(len(order)))), tuple(order)


def join(stacked: Tensor, spec: P, mesh: Mesh, axes: Sequence[str]) -> Tensor:
    """Puts local values together; inverse of `cut` for every axis of `axes` in front of them.

    Over an axis that `spec` does not mention the first rank's value counts, over a partial one the
    sum.
    """
    left = list(axes)
    for axis in axes:
        if axis in spec.mentioned:
            continue
        at = left.index(axis)
        partial = axis in spec.partial
        stacked = _add(stacked, at) if partial else stacked.select(at, 0)
        left.remove(axis)
    for dim, names in spec.sharded_dims:
        # Those of earlier cuts have been merged; the leading dims that are left come before `dim`.
        at = len(left) - len(names) + dim
        stacked = stacked.movedim([left.index(a) for a in names], list(range(at, at + len(names))))
        stacked = stacked.flatten(at, at + len(names))
        left = [axis for axis in left if axis not in names]
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
    shards, order = cut(grad, spec, mesh)
    for position, axis in enumerate(mesh.axis_names):
        if axis not in order:
            shards = shards.unsqueeze(position)
    return shards.expand(*mesh.axis_sizes, *shards.shape[len(mesh.axis_names) :])


def locals_of(x: Tensor, spec: P, mesh: Mesh) -> list[Tensor]:
    """Each rank's piece of a global tensor, by rank; views where it can be."""
    return list(stack_cotangent(x, spec, mesh).flatten(0, len(mesh.axis_names) - 1).unbind(0))


def global_of(values: Sequence[Tensor], spec: P, mesh: Mesh) -> Tensor:
    """Puts all ranks' values together, by rank."""
    with without_autocast():
        stacked = torch.stack(list(values)).unflatten(0, mesh.axis_sizes)
    return join(stacked, spec, mesh, mesh.axis_names)

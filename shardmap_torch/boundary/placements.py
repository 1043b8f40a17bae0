"""Converts partition specs to placements of DTensor, and back.

Placements shard a dim by one mesh axis after the other, in mesh order. Where a spec names a later
axis before an earlier one, the earlier axis is a strided shard. DTensor's `shard_order` could
express the same, but is lost in views, sums and `detach`.
"""

from typing import TypeAlias

from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardmap_torch.core.caching import memo
from shardmap_torch.core.torch_private.dtensor import StridedShard
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P, expanded, sharded_by

Placements: TypeAlias = tuple[Placement, ...]


@memo
def placements_of(mesh: Mesh, spec: P) -> Placements:
    """Returns the placements of a spec, one per mesh axis.

    Example:
        >>> from shardmap_torch import make_mesh
        >>> mesh = make_mesh((2, 4), ("dp", "tp"), kind="simulated")
        >>> placements_of(mesh, P(None, "tp"))
        (Replicate(), Shard(dim=1))
    """
    spec = expanded(spec, mesh.aliases)
    shards = {
        axis: _shard(mesh, dim, axes[:at], axis)
        for dim, axes in spec.sharded_dims
        for at, axis in enumerate(axes)
    }
    others = {axis: Partial() for axis in spec.partial}
    return tuple(shards.get(axis, others.get(axis, Replicate())) for axis in mesh.axis_names)


def _shard(mesh: Mesh, dim: int, major: tuple[str, ...], axis: str) -> Placement:
    after = mesh.axis_names[mesh.axis_names.index(axis) :]
    blocks = mesh.num_ranks([other for other in major if other in after])
    if blocks == 1:
        return Shard(dim)
    return StridedShard(dim, split_factor=blocks)


def spec_of(x: DTensor, mesh: Mesh) -> P | Placement:
    """Returns the spec of a DTensor, or the placement that no spec can express."""
    axes_by_dim: list[list[str]] = [[] for _ in x.shape]
    # From the last axis on, since a strided shard is inserted before those of later axes.
    for axis, placement in reversed(list(zip(mesh.axis_names, x.placements, strict=True))):
        if isinstance(placement, Replicate | Partial):
            continue
        at = _insertion_index(mesh, axes_by_dim, placement)
        if at is None:
            return placement
        axes_by_dim[placement.dim].insert(at, axis)  # type: ignore[attr-defined]  # a sharded placement
    for order in getattr(x._spec, "shard_order", None) or ():
        axes_by_dim[order.tensor_dim] = [mesh.axis_names[i] for i in order.mesh_dims]
    placed = zip(mesh.axis_names, x.placements, strict=True)
    partial = [axis for axis, placement in placed if placement.is_partial()]
    return sharded_by(axes_by_dim, partial=partial)


def _insertion_index(mesh: Mesh, axes_by_dim: list[list[str]], placement: Placement) -> int | None:
    """Returns the index in the dim's tuple at which an axis is inserted; None if there is none."""
    if isinstance(placement, Shard):
        return 0
    blocks: int | None = getattr(placement, "split_factor", None)
    if blocks is None:
        return None
    axes = axes_by_dim[placement.dim]  # type: ignore[attr-defined]  # it is a strided shard
    indices = range(len(axes) + 1)
    return next((k for k in indices if mesh.num_ranks(axes[:k]) == blocks), None)

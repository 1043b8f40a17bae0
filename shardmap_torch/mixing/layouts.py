"""Layouts: the specs by which values cross the boundary, with the automatic axes that shard them.

A spec of `shard_map` names bound axes. Where an automatic axis shards a value too, it becomes the
last, the most minor axis of its dim: what a rank has is a shard over the automatic axes of what the
body sees as its local value.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from shardmap_torch.boundary.placements import Placements, placements_of, spec_of
from shardmap_torch.core.caching import memo
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P, mismatches, sharded_by


def automatic_axes(mesh: Mesh, bound: frozenset[str]) -> tuple[str, ...]:
    """Returns the axes that a body has not bound, in mesh order."""
    return tuple(axis for axis in mesh.axis_names if axis not in bound)


def entry_spec(mesh: Mesh, spec: P, axes: Sequence[str], x: Any) -> P:
    """Adds to the spec of an argument the automatic axes that shard it and can stay.

    They cannot where shards would be uneven, or where the value would have to be reordered: there
    the value is global over these axes.
    """
    base = base_of(x) if isinstance(x, Tensor) else x
    if not is_dtensor(base) or base.device_mesh != mesh.device_mesh:
        return spec
    known = spec_of(base, mesh)
    if isinstance(known, Placement):
        return spec
    for dim, names in known.sharded_dims:
        own = tuple(axis for axis in names if axis in axes)
        added = _with_axes(spec, dim, own)
        in_order = own == tuple(axis for axis in axes if axis in own)
        if own and in_order and _can_stay(mesh, added, dim, base):
            spec = added
    return spec


def _can_stay(mesh: Mesh, spec: P, dim: int, x: DTensor) -> bool:
    if mismatches(spec, tuple(x.shape), mesh.shape):
        return False
    now, after = x.placements, placements_of(mesh, spec)
    return all(
        type(to) is Shard or placement == to
        for placement, to in zip(now, after, strict=True)
        if not isinstance(to, Replicate | Partial) and to.dim == dim  # type: ignore[attr-defined]
    )


def exit_spec(mesh: Mesh, spec: P, axes: Sequence[str], placements: Placements) -> P:
    """Adds to the spec of a result the automatic axes that shard it."""
    for axis, placement in zip(axes, placements, strict=True):
        if isinstance(placement, Shard):
            spec = _with_axes(spec, placement.dim, (axis,))
    return spec


@memo
def _with_axes(spec: P, dim: int, axes: tuple[str, ...]) -> P:
    """Appends axes, as the most minor ones, to the entry of a dim."""
    axes_by_dim = dict(spec.sharded_dims)
    axes_by_dim[dim] = (*axes_by_dim.get(dim, ()), *axes)
    num_dims = max(len(spec.entries), dim + 1)
    return sharded_by([axes_by_dim.get(at, ()) for at in range(num_dims)], **dict(spec.typed()))


def body_placements(mesh: Mesh, spec: P, axes: Sequence[str]) -> Placements:
    """Returns the placements, over the automatic axes, of a value that entered by such a spec."""
    shards = {axis: Shard(dim) for dim, names in spec.sharded_dims for axis in names}
    return tuple(shards.get(axis, Replicate()) for axis in axes)


def replicated(num_axes: int) -> Placements:
    """Returns the placements of a value that is global over all automatic axes."""
    return (Replicate(),) * num_axes


def settled(
    placements: Placements, moved: Sequence[int] = (), *, linear: bool = False
) -> Placements:
    """Replicates where a value is not plainly sharded, and where one of the dims `moved` is.

    Pending sums stay for what is `linear`; not those of an embedding, which come with a mask.

    Example:
        >>> settled((Shard(0), Shard(1), Partial()), moved=[1], linear=True)
        (Shard(dim=0), Replicate(), Partial(sum))
    """

    def stays(p: Placement) -> bool:
        if type(p) is Shard:
            return p.dim not in moved
        return linear and type(p) is Partial and p.reduce_op in ("sum", "avg")

    return tuple(p if stays(p) else Replicate() for p in placements)


def evenly(placements: Placements, shape: Sequence[int], sizes: Sequence[int]) -> Placements:
    """Replicates where shards would be uneven."""
    counts = [1] * len(shape)
    for p, size in zip(placements, sizes, strict=True):
        if isinstance(p, Shard):
            counts[p.dim] *= size
    uneven = [dim for dim, count in enumerate(counts) if shape[dim] % count]
    return settled(placements, uneven)

"""Parameters of several parts, each of which is sharded by itself."""

from collections.abc import Sequence

from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Shard

from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.core.torch_private.dtensor import StridedShard
from shardmap_torch.mesh import Mesh
from shardmap_torch.parallel.words import Split
from shardmap_torch.spec import P


def pack(value: Tensor, split: Split | None, mesh: Mesh, spec: P) -> Tensor:
    """Returns a parameter with a dim for its parts, by whose next one it is sharded."""
    if split is None or split.parts == 1:
        return value
    whole = value.to_local() if isinstance(value, DTensor) else value
    parts: Tensor = whole.unflatten(split.dim, (split.parts, -1))
    if not isinstance(value, DTensor):
        return parts
    placements = placements_of(mesh, spec)
    return DTensor.from_local(parts, value.device_mesh, placements, run_check=False)


def unpack(value: Tensor, split: Split | None) -> Tensor:
    """Undoes `pack` on one rank."""
    return value if split is None else value.flatten(split.dim, split.dim + 1)


def placements_of_split(mesh: Mesh, split: Split | None, spec: P) -> Sequence[Placement]:
    """Returns the placements of a parameter on the mesh."""
    if split is None or split.parts == 1:
        return placements_of(mesh, spec)
    return [_without_parts(each, split) for each in placements_of(mesh, spec)]


def _without_parts(placement: Placement, split: Split) -> Placement:
    """Returns a placement of a packed parameter as one of the parameter itself."""
    if not isinstance(placement, Shard) or placement.dim < split.dim:
        return placement
    if placement.dim > split.dim + 1:
        return Shard(placement.dim - 1)
    return StridedShard(split.dim, split_factor=split.parts)

"""Named meshes of ranks: simulated, over process groups, or abstract."""

from shardmap_torch.mesh.make import as_mesh, current_mesh, make_mesh, use_mesh
from shardmap_torch.mesh.mesh import MAX_RANKS, PROCESS_KINDS, Kind, Mesh, Strategy

__all__ = [
    "MAX_RANKS",
    "PROCESS_KINDS",
    "Kind",
    "Mesh",
    "Strategy",
    "as_mesh",
    "current_mesh",
    "make_mesh",
    "use_mesh",
]

"""Runtime of abstract meshes, which have no data: calls are checked, and return shapes."""

from typing import Final

from shardmap_torch.boundary.call import Call
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import MeshError

# Values stay as they are on simulated meshes too; here they are used for their shapes only.
from shardmap_torch.run.simulated import place

__all__ = ["has_data", "place", "run"]

has_data: Final = False


def run(call: Call) -> Tree:
    """Refuses to run.

    Raises:
        MeshError: always.
    """
    raise MeshError(f"{call.name}: an abstract mesh has no data to run on; use check=True.")

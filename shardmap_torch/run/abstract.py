"""Runtime of abstract meshes, which have no data: calls are checked, and return shapes."""

from typing import Final

from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import MeshError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

has_data: Final = False
is_distributed: Final = False


def run(call: Call, batches: bool) -> Tree:
    """Refuses to run.

    Raises:
        MeshError: always.
    """
    raise MeshError(f"{call.name}: an abstract mesh has no data to run on; use check=True.")


def place(mesh: Mesh, spec: P, x: Tensor, as_dtensor: bool) -> Tensor:
    """Returns the value: it is used for its shape only."""
    return x


def join(mesh: Mesh, spec: P, x: Tensor) -> Tensor:
    """Returns the value: it is used for its shape only."""
    return x


def gather(mesh: Mesh, x: Tensor) -> Tensor:
    """Stacks the one process's tensor."""
    return x.unsqueeze(0)

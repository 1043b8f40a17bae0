"""A functional `shard_map` for PyTorch with typed, differentiable collectives."""

from shardmap_torch import lax
from shardmap_torch.errors import (
    CollectiveError,
    CollectiveMismatchError,
    CommunicationError,
    KernelError,
    MeshError,
    ShardMapError,
    ShardTypeError,
    SpecError,
    TransformError,
)
from shardmap_torch.mesh import Mesh, current_mesh, make_mesh, use_mesh
from shardmap_torch.ops import (
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    broadcast,
    convert,
    ppermute,
    redistribute,
    reduce_scatter,
    reinterpret,
    reshard,
    shift,
)
from shardmap_torch.placing import device_put, from_local, full
from shardmap_torch.spec import P
from shardmap_torch.transform import shard_map
from shardmap_torch.types import I, Partial, R, S, V

__version__ = "0.1.0"

__all__ = [
    "CollectiveError",
    "CollectiveMismatchError",
    "CommunicationError",
    "I",
    "KernelError",
    "Mesh",
    "MeshError",
    "P",
    "Partial",
    "R",
    "S",
    "ShardMapError",
    "ShardTypeError",
    "SpecError",
    "TransformError",
    "V",
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_index",
    "axis_size",
    "broadcast",
    "convert",
    "current_mesh",
    "device_put",
    "from_local",
    "full",
    "lax",
    "make_mesh",
    "ppermute",
    "redistribute",
    "reduce_scatter",
    "reinterpret",
    "reshard",
    "shard_map",
    "shift",
    "use_mesh",
]

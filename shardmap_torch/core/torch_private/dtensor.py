"""Private names of DTensor; apart, since importing it takes a second."""

from typing import Any

from torch.distributed.tensor import DTensor, placement_types

from shardmap_torch.core.torch_private.names import DTENSOR, unsupported

try:
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
except ImportError as error:
    raise unsupported(DTENSOR) from error

StridedShard: Any = getattr(placement_types, "_StridedShard", None)
"""The placement of a dim sharded in strides, or None where this torch has none."""


def sharding_propagator() -> Any:
    """Returns what infers how the results of an operator are sharded.

    Raises:
        UnsupportedTorchError: this torch has none under the name that is known.
    """
    try:
        return DTensor._op_dispatcher.sharding_propagator
    except AttributeError as error:
        raise unsupported(DTENSOR) from error


__all__ = (
    "AsyncCollectiveTensor",
    "DTensorSpec",
    "OpSchema",
    "StridedShard",
    "TensorMeta",
    "sharding_propagator",
)

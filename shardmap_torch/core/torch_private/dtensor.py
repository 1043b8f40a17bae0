"""Private names of DTensor; apart, since importing it takes a second."""

from typing import Any

from torch.distributed.tensor import DTensor

from shardmap_torch.core.torch_private.names import DTENSOR, unsupported

try:
    from torch.distributed import _state_dict_utils as state_dict_utils
    from torch.distributed._functional_collectives import AsyncCollectiveTensor
    from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta
    from torch.distributed.tensor._op_schema import OpSchema
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard
except ImportError as error:
    raise unsupported(DTENSOR) from error


def sharding_propagator() -> Any:
    """Returns what infers how the results of an operator are sharded.

    Raises:
        UnsupportedTorchError: this torch has none under the name that is known.
    """
    try:
        return DTensor._op_dispatcher.sharding_propagator
    except AttributeError as error:
        raise unsupported(DTENSOR) from error

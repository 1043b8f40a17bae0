"""Recognises DTensors without importing `torch.distributed.tensor`, which takes a second."""

import sys
from typing import TYPE_CHECKING, TypeGuard

from shardmap_torch.core.caching import constant

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


class _NotImported:
    """Stands for DTensor while nothing has imported it, so that no value can be one."""


# A constant, since Dynamo does not trace through `sys.modules`.
@constant
def dtensor_class() -> type:
    """Returns the class, for loops over many values; see `is_dtensor`."""
    module = sys.modules.get("torch.distributed.tensor")
    dtensor: type = getattr(module, "DTensor", _NotImported)
    return dtensor


def is_dtensor(x: object) -> "TypeGuard[DTensor]":
    """Returns whether `x` is a DTensor.

    Example:
        >>> import torch
        >>> is_dtensor(torch.ones(2))
        False
    """
    return isinstance(x, dtensor_class())

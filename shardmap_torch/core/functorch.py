"""torch.func's levels of transforms: the values under them, and what they differentiate."""

from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.torch_private.engine import functorch


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor under all torch.func transforms."""
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def can_receive_gradient(value: Any) -> bool:
    """Returns whether a gradient can flow into `value` in this call, at any functorch level."""
    if not isinstance(value, Tensor) or not torch.is_grad_enabled():
        return False
    while True:
        if value.requires_grad:
            return True
        # Dynamo traces plain tensors only, and not this question.
        if torch.compiler.is_dynamo_compiling() or not functorch.is_functorch_wrapped_tensor(value):
            return False
        value = functorch.get_unwrapped(value)


def dims_of(tensor: Tensor) -> tuple[list[int], dict[int, int]]:
    """Finds a tensor's dims in the tensor under all transforms.

    Returns:
        For each dim its dim there, and for the level of each vmap the dim that it batches there.

    Example:
        >>> found = []
        >>> def note(x):
        ...     found.append(dims_of(x))
        ...     return x
        >>> _ = torch.func.vmap(note, in_dims=1)(torch.zeros(2, 3, 4))
        >>> found
        [([0, 2], {1: 1})]
    """
    if not functorch.is_functorch_wrapped_tensor(tensor):
        return list(range(tensor.ndim)), {}
    dims, levels = dims_of(functorch.get_unwrapped(tensor))
    if functorch.is_batchedtensor(tensor):
        levels[functorch.maybe_get_level(tensor)] = dims.pop(functorch.maybe_get_bdim(tensor))
    return dims, levels

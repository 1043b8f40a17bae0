"""torch.func's levels of transforms: the values under them, and what they differentiate."""

from typing import Any

import torch
from torch import Tensor


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor under all torch.func transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor


def can_receive_gradient(value: Any) -> bool:
    """Returns whether a gradient can flow into `value` in this call, at any functorch level."""
    if not isinstance(value, Tensor) or not torch.is_grad_enabled():
        return False
    functorch = torch._C._functorch
    while True:
        if value.requires_grad:
            return True
        # Dynamo traces plain tensors only, and not this question.
        if torch.compiler.is_dynamo_compiling() or not functorch.is_functorch_wrapped_tensor(value):
            return False
        value = functorch.get_unwrapped(value)

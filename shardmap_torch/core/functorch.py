"""Unwraps tensors of torch.func's transforms."""

import torch
from torch import Tensor


def base_of(tensor: Tensor) -> Tensor:
    """Returns the tensor under all torch.func transforms."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(tensor):
        tensor = functorch.get_unwrapped(tensor)
    return tensor

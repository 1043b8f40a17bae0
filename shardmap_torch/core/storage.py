"""Detection of tensors that share memory."""

import torch
from torch import Tensor


def memory_of(x: Tensor) -> int | None:
    """Returns a key that tensors sharing memory have in common; None where unknown."""
    functorch = torch._C._functorch
    while functorch.is_functorch_wrapped_tensor(x):
        x = functorch.get_unwrapped(x)
    return x.untyped_storage()._cdata if x.layout is torch.strided else None


def unviewed(x: Tensor) -> Tensor:
    """`x` itself, a view of a buffer that nobody else has, as a tensor of its own.

    Autograd forbids to write into a view that a Function returns.
    """
    return x.data if x._is_view() else x

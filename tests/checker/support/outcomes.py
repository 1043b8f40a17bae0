"""A result and its gradients, for comparing ranks with one device."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor


def gradients_of(f: Callable[..., Tensor], operands: Sequence[Tensor]) -> list[Tensor]:
    """Returns a function's result, and the gradients of a sum with a weight for each entry."""
    leaves = [x.clone().requires_grad_(x.is_floating_point()) for x in operands]
    y = f(*leaves)
    seed = torch.linspace(0.5, 1.5, y.numel(), dtype=y.dtype).reshape(y.shape)
    smooth = [x for x in leaves if x.requires_grad]
    found = torch.autograd.grad(y, smooth, seed, allow_unused=True)
    none = torch.zeros((), dtype=y.dtype)
    return [y.detach(), *(none if g is None else g for g in found)]

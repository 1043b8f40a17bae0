"""Results of a function and their gradients, for comparing ranks with one device."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map


def fresh(args: Any, learns: bool = True) -> Any:
    """Returns copies of the tensors, as leaves that need gradients if they are floating."""
    return tree_map(
        lambda x: x.detach().clone().requires_grad_(learns and x.is_floating_point()), args
    )


def with_gradients(values: Any, args: Any) -> list[Tensor]:
    """Returns the values, and the gradients of a sum with a weight of its own for each entry."""
    found = tree_leaves(values)
    terms = [
        (y * torch.linspace(0.5, 2.0, y.numel(), dtype=y.dtype).reshape(y.shape)).sum()
        for y in found
        if y.requires_grad
    ]
    if not terms:
        return found
    leaves = [x for x in tree_leaves(args) if x.requires_grad]
    gradients = torch.autograd.grad(sum(terms), leaves, materialize_grads=True)
    return [*(y.detach() for y in found), *gradients]


def outcome(f: Callable[..., Any], args: Any) -> list[Tensor]:
    """Returns the results of a function, and the gradients of all arguments that can have one."""
    leaves = fresh(args)
    return with_gradients(f(*leaves), leaves)

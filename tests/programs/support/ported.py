"""Compares a program that was ported to a mesh with what its original computes on one device."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import Mesh, P, shard_map
from tests.programs.support.everywhere import same

Params = Mapping[str, Tensor]


def outcome(f: Callable[..., Tensor], params: Params, data: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns a loss, and its gradients by all parameters."""
    leaves = {name: value.detach().clone().requires_grad_() for name, value in params.items()}
    loss = f(leaves, *data)
    return loss, *torch.autograd.grad(loss, list(leaves.values()))


def compare(
    mesh: Mesh,
    body: Callable[..., Tensor],
    original: Callable[..., Tensor],
    params: Params,
    data: Sequence[Tensor],
    in_specs: tuple[Any, ...],
    check: Any,
) -> None:
    """Requires that a body that returns a loss is the original, with its gradients."""
    mapped = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(), check=check)
    same(outcome(mapped, params, data), outcome(original, params, data))

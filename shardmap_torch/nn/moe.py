"""Mixture of experts, sharded over the axis that shards the batch (expert parallelism)."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import LayerError
from shardmap_torch.nn.core.arguments import check_inner, num_ranks, num_rows, replicate_weight
from shardmap_torch.nn.core.region import axes_of
from shardmap_torch.ops import all_reduce, all_to_all, axis_size
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, TypeLike


def moe(
    x: Tensor,
    router: Tensor,
    experts: Any,
    axis: str,
    *,
    expert: Callable[[Any, Tensor], Tensor],
    num_selected: int = 2,
    capacity_factor: float | None = 1.25,
    batch_axis: Axis = (),
    router_type: TypeLike = I,
) -> tuple[Tensor, Tensor]:
    """Sends each position to the experts that a router selects, and sums their weighted results.

    Sequences are routed one by one: an expert takes at most C positions of a sequence, the first
    choices first, then in order; positions beyond that get nothing from that expert. Dropping thus
    depends on the sequence alone and not on the number of ranks. With
    `capacity_factor=None` C is the length of the sequence and nothing is dropped, at the cost of
    e / num_selected times the work and the bytes (dropless by padding; `dropless_moe` needs none).

    Shape: x [b/n, t, d], router [d, e], experts with leading dimension e/n on each of n ranks gives
    y [b/n, t, d] and a scalar loss; C = ceil(capacity_factor * num_selected * t / e). Types: x and
    the experts are sharded over `axis` along dimension 0, the router is I; y is as x, the loss I
    over `axis` and `batch_axis`. Backward: two all-to-alls as well, an all-reduce of the router's
    gradient. Sends (n-1)/n * b/n * e * C * d numbers, twice, and 2 * e numbers for the loss.

    Args:
        x: sequences of this rank.
        router: scores of the experts.
        experts: a pytree of this rank's experts.
        axis: over which the experts and the sequences are sharded.
        expert: takes `experts` and the positions sent to them, [e/n, b * C, d], and returns a
            tensor of that shape.
        num_selected: experts per position.
        capacity_factor: capacity relative to an even distribution; None drops nothing.
        batch_axis: other axes over which the sequences are sharded, so that the loss is that of the
            global batch. The router and the experts must be R over them.
        router_type: type of the router over `axis`; R if the caller has converted all weights of a
            model at once, or sums their gradients.

    Returns:
        The result, and the load-balancing loss e * sum(f * p): f the share of all choices that fall
        on an expert, p its mean probability, over the global batch. It is 1 for even loads.

    Raises:
        LayerError: shapes that do not match, or more experts selected than there are.
        CollectiveError: outside a body, or an unknown axis.

    Source: Lepikhin et al. 2020, "GShard"; the loss: Fedus et al. 2021, "Switch transformers".

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("ep",), kind="simulated")
        >>> scale = lambda factors, tokens: tokens * factors[:, None, None]
        >>> f = lambda x, r, e: moe(x, r, e, "ep", expert=scale, num_selected=1)
        >>> specs = P("ep"), P(), P("ep")
        >>> g = shard_map(f, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P()))
        >>> y, loss = g(torch.eye(2).reshape(2, 1, 2), torch.eye(2), torch.tensor([10.0, 100.0]))
        >>> y.squeeze()
        tensor([[ 10.,   0.],
                [  0., 100.]])
    """
    num_experts = router.shape[-1]
    check_experts("moe", x, router, experts, axis, num_selected)
    router = replicate_weight(router, axis, router_type, "moe", "router_type")
    probabilities = (x @ router).softmax(-1)  # [b/n, t, e]
    values, chosen = probabilities.topk(num_selected, -1)
    choices = one_hot(chosen, num_experts, x.dtype)  # [b/n, t, k, e]
    capacity = x.shape[1]
    if capacity_factor is not None:
        capacity = min(capacity, math.ceil(capacity_factor * num_selected * capacity / num_experts))
    slots = _slots(choices, capacity)  # [b/n, t, k, e, C]
    shares = values / values.sum(-1, keepdim=True)
    dispatched = _flat_slots(slots.sum(2)).mT @ x  # [b/n, e * C, d]
    dispatched = dispatched.unflatten(1, (num_experts, capacity)).transpose(0, 1)
    own = all_to_all(dispatched, axis, split_dim=0, concat_dim=1)  # [e/n, b, C, d]
    results = expert(experts, own.flatten(1, 2)).unflatten(1, own.shape[1:3])
    returned = all_to_all(results, axis, split_dim=1, concat_dim=0)  # [e, b/n, C, d]
    weights = (slots * shares[..., None, None]).sum(2)
    y: Tensor = _flat_slots(weights) @ returned.transpose(0, 1).flatten(1, 2)
    return y, balance_loss(probabilities, choices, (axis, *axes_of(batch_axis)))


def one_hot(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Marks numbers below `count`: [...] -> [..., count]."""
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).to(dtype)


def _flat_slots(slots: Tensor) -> Tensor:
    """Flattens the slots of all experts: [b, t, e, C] -> [b, t, e * C]."""
    return slots.flatten(2)


def _slots(choices: Tensor, capacity: int) -> Tensor:
    """Assigns each choice a slot of its expert: [b, t, k, e] -> one-hot [b, t, k, e, C].

    Choices beyond the capacity get none: first choices come before second ones, and then positions
    in order.
    """
    by_choice = choices.transpose(1, 2).flatten(1, 2)  # [b, k * t, e]
    order_of_arrival = by_choice.cumsum(1) - 1
    order = order_of_arrival.unflatten(1, (choices.shape[2], choices.shape[1])).transpose(1, 2)
    free: Tensor = order.unsqueeze(-1) == torch.arange(capacity, device=choices.device)
    return choices.unsqueeze(-1) * free


def balance_loss(probabilities: Tensor, choices: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Computes the load-balancing loss over the batch of all ranks."""
    num_tokens = probabilities.shape[0] * probabilities.shape[1] * axis_size(axes)
    load = all_reduce(choices.sum((0, 1, 2)), axes, dst=I) / (num_tokens * choices.shape[2])
    chance = all_reduce(probabilities.sum((0, 1)), axes, dst=I) / num_tokens
    return (load * chance).sum() * choices.shape[-1]


def check_experts(
    name: str, x: Tensor, router: Tensor, experts: Any, axis: str, num_selected: int
) -> None:
    """Requires shapes of a mixture of experts.

    Raises:
        LayerError: they do not match, or more experts are selected than there are.
    """
    check_inner(name, x, num_rows(name, router, "router"), router, "router")
    num_experts, count = router.shape[-1], num_ranks(name, axis)
    sizes = [list(leaf.shape) for leaf in flatten(experts)[0] if isinstance(leaf, Tensor)]
    if any(size[:1] != [num_experts / count] for size in sizes):
        raise LayerError(
            f"{name}: {num_experts} experts over {count} ranks of {axis!r} are "
            f"{num_experts / count:g} on each, and the experts' leaves are {sizes}."
        )
    if x.ndim != 3 or not 1 <= num_selected <= num_experts:
        raise LayerError(
            f"{name} takes x [b/n, t, d] and selects 1 to {num_experts} experts, not x "
            f"{list(x.shape)} and num_selected={num_selected}."
        )

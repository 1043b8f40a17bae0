"""Mixtures of experts, sharded over the axis that shards the batch (expert parallelism).

Products of groups of rows, of which data says how many rows each has, are custom operators: sizes
that data decides are no shapes, so the operands keep theirs, and the loop over the groups is out of
sight of what interprets programs without data.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.torch_private.engine import are_transforms_active
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.errors import LayerError
from shardmap_torch.nn.arguments import axes_of, check_inner, num_rows, replicate_weight
from shardmap_torch.nn.region import PerRank, Types
from shardmap_torch.ops import all_reduce, all_to_all, axis_size, ragged_all_to_all
from shardmap_torch.ops.arguments import Axis, finest
from shardmap_torch.spec import P
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
    gradient. Sends (n-1)/n * b/n * e * C * d numbers, twice, and all-reduces 2 * e for the loss.

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
    check_experts("moe", x, router, experts, axis, num_selected)
    num_experts = router.shape[-1]
    router = replicate_weight(router, axis, router_type, "moe", "router_type")
    probabilities = (x @ router).softmax(-1)  # [b/n, t, e]
    values, chosen = probabilities.topk(num_selected, -1)
    choices = one_hot(chosen, num_experts, x.dtype)  # [b/n, t, k, e]
    capacity = x.shape[1]
    if capacity_factor is not None:
        capacity = min(capacity, math.ceil(capacity_factor * num_selected * capacity / num_experts))
    slots = _slots(choices, capacity)  # [b/n, t, k, e, C]
    shares = values / values.sum(-1, keepdim=True)
    dispatched = slots.sum(2).flatten(2).mT @ x  # [b/n, e * C, d]
    dispatched = dispatched.unflatten(1, (num_experts, capacity)).transpose(0, 1)
    own = all_to_all(dispatched, axis, split_dim=0, concat_dim=1)  # [e/n, b, C, d]
    results = expert(experts, own.flatten(1, 2)).unflatten(1, own.shape[1:3])
    returned = all_to_all(results, axis, split_dim=1, concat_dim=0)  # [e, b/n, C, d]
    weights = (slots * shares[..., None, None]).sum(2)
    y: Tensor = weights.flatten(2) @ returned.transpose(0, 1).flatten(1, 2)
    return y, balance_loss(probabilities, choices, (axis, *axes_of(batch_axis)))


def one_hot(numbers: Tensor, count: int, dtype: torch.dtype) -> Tensor:
    """Marks numbers below `count`: [...] -> [..., count]."""
    return (numbers.unsqueeze(-1) == torch.arange(count, device=numbers.device)).to(dtype)


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
    num_experts, count = router.shape[-1], axis_size(axis)
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


Expert = Callable[[Any, Tensor, Tensor], Tensor]


def dropless_moe(
    x: Tensor,
    router: Tensor,
    experts: Any,
    axis: str,
    *,
    expert: Expert,
    num_selected: int = 2,
    room: int | None = None,
    batch_axis: Axis = (),
    router_type: TypeLike = I,
) -> tuple[Tensor, Tensor]:
    """Sends each position to the experts that a router selects, however many select the same.

    Rows travel and are multiplied only where an expert was selected; see `ragged_all_to_all` and
    `grouped_linear`. A rank has memory for `room` rows. With `check="global"` the exchange and the
    experts are a `local_region`.

    Shape: x [b/n, t, d], router [d, e], experts with leading dimension e/n on each of n ranks gives
    y [b/n, t, d] and a scalar loss. Types: x and the experts are sharded over `axis`, experts
    along dimension 0, the router is I; y is as x, the loss I over `axis` and `batch_axis`.
    Backward: two all-to-alls as well, an all-reduce of the router's gradient. Sends at most
    b/n * t * num_selected * d numbers, and back as many as its experts got; 2 * n * (n-1) + e
    integers, and all-reduces 2 * e numbers. Strategy "auto" of a simulated mesh runs it as ranks.

    Args:
        x: sequences of this rank.
        router: scores of the experts.
        experts: a pytree of this rank's experts.
        axis: over which the experts and the sequences are sharded.
        expert: takes `experts`, rows [room, d] that are sorted by expert, and how many of them each
            expert has, integers [e/n]; returns [room, d]. Rows behind those are zeros, and what it
            makes of them is ignored. `grouped_linear` is a layer for it.
        num_selected: experts a position.
        room: rows that a rank has memory for. By default all that there are on all ranks, which
            always suffices; where less does not, all ranks raise an error.
        batch_axis: other axes over which the sequences are sharded, so that the loss is that of the
            global batch. The router and the experts must be R over them.
        router_type: type of the router over `axis`; R if the caller has converted all weights of a
            model at once, or sums their gradients.

    Returns:
        The result, and the load-balancing loss of `moe`.

    Raises:
        LayerError: shapes that do not match, or more experts selected than there are.
        CollectiveError: outside a body, an unknown axis, or `room` is too small.

    Source: Gale et al. 2022, "MegaBlocks"; Megatron-LM's dropless token dispatcher.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> from shardmap_torch.nn import grouped_linear
        >>> mesh = make_mesh((2,), ("ep",), kind="simulated")
        >>> linear = lambda weight, rows, sizes: grouped_linear(rows, weight, sizes)
        >>> f = lambda x, r, e: dropless_moe(x, r, e, "ep", expert=linear, num_selected=1)
        >>> specs = P("ep"), P(), P("ep")
        >>> g = shard_map(f, mesh=mesh, in_specs=specs, out_specs=(P("ep"), P()))
        >>> experts = torch.stack([10 * torch.eye(2), 100 * torch.eye(2)])
        >>> y, loss = g(torch.eye(2).reshape(2, 1, 2), torch.eye(2), experts)
        >>> y.squeeze()
        tensor([[ 10.,   0.],
                [  0., 100.]])
    """
    check_experts("dropless_moe", x, router, experts, axis, num_selected)
    num_experts = router.shape[-1]
    router = replicate_weight(router, axis, router_type, "dropless_moe", "router_type")
    chances = (x @ router).softmax(-1)  # [b/n, t, e]
    values, chosen = chances.topk(num_selected, -1)
    shares = values / values.sum(-1, keepdim=True)
    leaves, structure = flatten(experts)

    def apply(leaves: Sequence[Tensor], rows: Tensor, sizes: Tensor) -> Tensor:
        return expert(unflatten(structure, leaves), rows, sizes)

    def routed(x: Tensor, shares: Tensor, chosen: Tensor, *leaves: Tensor) -> Tensor:
        sizes = one_hot(chosen, num_experts, torch.int64).sum((0, 1, 2))
        by_expert = chosen.flatten().argsort(stable=True)  # this rank's choices
        rows = x.flatten(0, 1).index_select(0, by_expert // num_selected)
        outputs = _exchanged(rows, sizes, axis, room, partial(apply, leaves))
        own = outputs.index_select(0, by_expert.argsort()).unflatten(0, chosen.shape)
        weighted: Tensor = own * shares.unsqueeze(-1)
        return weighted.sum(2)

    y: Tensor = PerRank(routed, partial(_types, axis))(x, shares, chosen, *leaves)
    picks = one_hot(chosen, num_experts, x.dtype)
    return y, balance_loss(chances, picks, (axis, *axes_of(batch_axis)))


def _types(axis: str, layouts: Sequence[P], ranks: Sequence[int]) -> Types:
    """Derives the types of the region: positions stay where they are, however they are sharded."""
    positions = P(*[*layouts[0].entries, None, None][:2])
    experts = [P(finest((axis,)) or None, *layout.entries[1:]) for layout in layouts[3:]]
    return (positions, positions, positions, *experts), positions


def _exchanged(
    rows: Tensor, sizes: Tensor, axis: str, room: int | None, expert: Callable[..., Tensor]
) -> Tensor:
    """Has each rank's experts process the rows that all ranks have for them, and gets them back.

    Args:
        rows: of this rank, sorted by expert.
        sizes: number of rows for each expert of all ranks.
        axis: of the experts.
        room: see `dropless_moe`.
        expert: takes rows that are sorted by expert, and their numbers.
    """
    by_rank = sizes.unflatten(0, (axis_size(axis), -1))  # [n, e/n]
    here, received = ragged_all_to_all(rows, axis, send_sizes=by_rank.sum(1), length=room)
    counts = all_to_all(by_rank, axis, split_dim=0, concat_dim=0)  # by sender and own expert
    ends = counts.flatten().cumsum(0)
    block = torch.searchsorted(ends, torch.arange(here.shape[0], device=ends.device), right=True)
    # Behind the last block stand no rows: they belong to none of the experts, and come last.
    number = torch.where(block < ends.shape[0], block % counts.shape[1], counts.shape[1])
    order = number.argsort(stable=True)
    outputs = expert(here.index_select(0, order), counts.sum(0))
    back = outputs.index_select(0, order.argsort())
    return ragged_all_to_all(back, axis, send_sizes=received, length=rows.shape[0])[0]


def grouped_linear(
    rows: Tensor, weight: Tensor, sizes: Tensor, *, bias: Tensor | None = None
) -> Tensor:
    """Applies the linear layer of expert g to the next `sizes[g]` rows.

    Rows behind all groups cost nothing and become zeros, and their gradient is zero.

    Shape: rows [r, d], weight [g, d, f], integers sizes [g], bias [g, f] give [r, f]. Types: those
    of a matmul. Sends nothing. The sizes are read by Python, so that a GPU is waited for.

    Args:
        rows: sorted by expert.
        weight: one matrix per expert.
        sizes: number of rows of each expert.
        bias: one row per expert.

    Raises:
        LayerError: shapes that do not match.

    Source: `torch.nn.functional.grouped_mm`; Gale et al. 2022, "MegaBlocks".

    Example:
        >>> weight, sizes = torch.tensor([[[10.0]], [[100.0]]]), torch.tensor([1, 2])
        >>> grouped_linear(torch.arange(1.0, 5.0).unsqueeze(1), weight, sizes).squeeze()
        tensor([ 10., 200., 300.,   0.])
    """
    num_experts = weight.shape[0] if weight.ndim == 3 else -1
    wrong_rows = rows.ndim != 2 or rows.shape[1:] != weight.shape[1:2]
    wrong_bias = bias is not None and bias.shape != (num_experts, *weight.shape[2:])
    if wrong_rows or wrong_bias or sizes.shape != (num_experts,):
        shapes = [None if x is None else list(x.shape) for x in (rows, weight, sizes, bias)]
        raise LayerError(
            "grouped_linear takes rows [r, d], weight [g, d, f], sizes [g] and bias [g, f] or "
            f"None, not {', '.join(map(str, shapes))}."
        )
    product = grouped_product(rows, weight, sizes)
    if bias is None:
        return product
    # A bias is a weight of a feature that is always 1; rows behind all groups get none.
    ones = rows.new_ones(rows.shape[0], 1)
    return product + grouped_product(ones, bias.unsqueeze(1), sizes)


@torch.library.custom_op("shardmap_torch::grouped_matmul", mutates_args=())
def grouped_matmul(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Multiplies the next `sizes[g]` rows with `weights[g]`; rows behind all groups become zeros.

    Shape: rows [r, d], weights [g, d, f], sizes [g] give [r, f].
    """
    out = rows.new_zeros(rows.shape[0], weights.shape[2])
    for group, place in _places(rows, sizes):
        torch.mm(rows[place], weights[group], out=out[place])
    return out


@torch.library.custom_op("shardmap_torch::grouped_outer", mutates_args=())
def grouped_outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    """Multiplies the next `sizes[g]` rows of both, transposed: the gradient of `weights[g]`.

    Shape: left [r, d], right [r, f], sizes [g] give [g, d, f].
    """
    out = left.new_zeros(sizes.shape[0], left.shape[1], right.shape[1])
    for group, place in _places(left, sizes):
        torch.mm(left[place].mT, right[place], out=out[group])
    return out


def _places(rows: Tensor, sizes: Tensor) -> Iterator[tuple[int, slice]]:
    start = 0
    for group, size in enumerate(sizes.tolist()):
        if size:
            yield group, slice(start, start + size)
        start += size
    if start > rows.shape[0]:
        raise ValueError(f"The groups have {start} rows together, of {rows.shape[0]}.")


@grouped_matmul.register_fake
def _matmul_shape(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], weights.shape[2])


@grouped_outer.register_fake
def _outer_shape(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    return left.new_empty(sizes.shape[0], left.shape[1], right.shape[1])


def grouped_product(rows: Tensor, weights: Tensor, sizes: Tensor) -> Tensor:
    """Computes `grouped_matmul`, differentiable under `torch.func.grad` too.

    torch's custom operators have no derivative there.
    """
    product: Tensor = _apply(_Matmul, grouped_matmul, rows, weights, sizes)
    return product


def _outer(left: Tensor, right: Tensor, sizes: Tensor) -> Tensor:
    outer: Tensor = _apply(_Outer, grouped_outer, left, right, sizes)
    return outer


def _apply(transformed: Any, operator: Any, *operands: Tensor) -> Any:
    return transformed.apply(*operands) if are_transforms_active() else operator(*operands)


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _matmul_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    rows, weights, sizes = ctx.saved_tensors
    return grouped_product(grad, weights.mT, sizes), _outer(rows, grad, sizes), None


def _outer_backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
    left, right, sizes = ctx.saved_tensors
    return grouped_product(right, grad.mT, sizes), grouped_product(left, grad, sizes), None


grouped_matmul.register_autograd(_matmul_backward, setup_context=_save)
grouped_outer.register_autograd(_outer_backward, setup_context=_save)


class _Matmul(torch.autograd.Function):
    forward = staticmethod(grouped_matmul)
    setup_context = staticmethod(_save)
    backward = staticmethod(_matmul_backward)


class _Outer(torch.autograd.Function):
    forward = staticmethod(grouped_outer)
    setup_context = staticmethod(_save)
    backward = staticmethod(_outer_backward)

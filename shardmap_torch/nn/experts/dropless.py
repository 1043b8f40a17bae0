"""A mixture of experts that drops nothing and pads nothing."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.nn.core.arguments import num_ranks, replicate_weight
from shardmap_torch.nn.core.region import PerRank, Types, axes_of
from shardmap_torch.nn.moe import balance_loss, check_experts, one_hot
from shardmap_torch.ops import all_to_all, ragged_all_to_all
from shardmap_torch.ops.arguments import Axis, finest
from shardmap_torch.spec import P
from shardmap_torch.types import I, TypeLike

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
    b/n * t * num_selected * d numbers, twice, and n * n + 3 * e numbers for sizes and the loss. A
    simulated mesh of strategy "auto" runs it as ranks.

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
        >>> linear = lambda weights, rows, sizes: grouped_linear(rows, weights, sizes)
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
        there = chosen.flatten().argsort(stable=True)  # this rank's choices, by expert
        rows = x.flatten(0, 1).index_select(0, there // num_selected)
        outputs = _exchanged(rows, sizes, axis, room, partial(apply, leaves))
        own = outputs.index_select(0, there.argsort()).unflatten(0, chosen.shape)
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
    by_rank = sizes.unflatten(0, (num_ranks("dropless_moe", axis), -1))  # [n, e/n]
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

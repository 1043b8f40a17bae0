"""Attention over a sharded sequence (context parallelism): ring attention and Ulysses."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.function import Function
from shardmap_torch.nn.arguments import check_shards
from shardmap_torch.nn.attention import attention, show_shapes
from shardmap_torch.nn.region import PerRank, per_rank
from shardmap_torch.ops import all_gather, all_to_all, axis_index, axis_size, shift
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import R


def head_tail_order(length: int, num_ranks: int) -> Tensor:
    """Returns the order of positions in which equal shards do equal work in causal attention.

    The sequence is divided into 2n chunks, and rank r of n = `num_ranks` gets chunks r and
    2n - 1 - r: one that sees little and one that sees much. Apply it, which sends nothing, outside
    of the body to tokens and targets alike (`tokens[:, order]`), and pass `order` itself, sharded
    in the same way, as `positions`.

    Returns:
        int64 [length], a permutation.

    Raises:
        LayerError: the length does not divide into 2n chunks.

    Source: Brandon et al. 2023, "Striped attention", in the form of Megatron-LM and Llama 3.

    Example:
        >>> head_tail_order(8, 2)
        tensor([0, 1, 6, 7, 2, 3, 4, 5])
    """
    if num_ranks < 1 or length % (2 * num_ranks):
        raise LayerError(
            f"head_tail_order: {length} positions do not divide into 2*{num_ranks} chunks, two "
            "for each rank. Pad the sequence."
        )
    chunks = torch.arange(length).reshape(2, num_ranks, -1)
    return torch.stack([chunks[0], chunks[1].flip(0)], 1).flatten()


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    causal: bool = True,
    positions: Tensor | None = None,
    balanced: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attends over a sequence whose positions are sharded; keys and values pass through a ring.

    Each rank keeps its queries. In n steps it receives the keys and values of all n ranks, and
    accumulates the softmax over all of them online. The backward passes through the ring again, and
    sends the gradients of keys and values along.

    Shape: q [..., t/n, h, d], k [..., t/n, g, d], v [..., t/n, g, e], g dividing h, gives
    [..., t/n, h, e]. Types: all are sharded over `axis` along dimension -3, as is the result.
    Memory: the arguments, the result and the scores of one step, [..., h, t/n, t/n], or a quarter
    of these if balanced. Backward: the gradients take n steps more. Sends (n-1) times the bytes of
    k and v forward, and (2n-1) times backward.

    Args:
        q: queries of this rank's positions.
        k: keys of this rank's positions.
        v: values of this rank's positions.
        axis: the axis over which the sequence is sharded.
        causal: whether a position sees only itself and those before.
        positions: [t/n] integers: the global position of each of this rank's, where the sequence is
            not in order.
        balanced: whether the sequence was sharded by `head_tail_order`, whose `positions` are then
            required. Each step then computes only the half that is not masked, on every rank;
            without it a causal mask wastes about half of the work. The result is NaN if the
            positions are not in that order.
        scale: of the scores; by default 1 / sqrt(d).

    Raises:
        LayerError: shapes that do not match, or `balanced` without positions or mask.
        CollectiveError: outside a body, or an unknown axis.

    Source: Liu et al. 2023, "Ring attention with blockwise transformers for near-infinite context".

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("cp",), kind="simulated")
        >>> f = lambda v: ring_attention(torch.zeros_like(v), torch.zeros_like(v), v, "cp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("cp"),), out_specs=P("cp"))
        >>> g(torch.tensor([1.0, 3.0, 5.0, 7.0]).reshape(4, 1, 1)).flatten().round()
        tensor([1., 2., 3., 4.])
    """
    _check_shapes("ring_attention", q, k, v, positions)
    if balanced and (positions is None or not causal):
        raise LayerError(
            "ring_attention: balanced=True is for causal attention, and needs positions=, this "
            "rank's part of head_tail_order(length, num_ranks)."
        )
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    region = ring_region(axis, causal, balanced, scale, positions is not None)
    y: Tensor = region(q, k, v, *([] if positions is None else [positions]))
    return y


def ring_region(
    axis: Axis, causal: bool, balanced: bool, scale: float, has_positions: bool
) -> PerRank:
    """Makes the per-rank code of `ring_attention`."""
    inputs = "...thd,...tgd,...tge" + (",t" if has_positions else "")

    @per_rank(f"{inputs}->...the", over={"t": axis})
    def attention_of_own_queries(
        q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None = None
    ) -> Tensor:
        return ring(q, k, v, positions, axis, causal, balanced, scale)

    return attention_of_own_queries


def ulysses_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    axis: Axis,
    *,
    causal: bool = True,
    positions: Tensor | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attends over a sequence whose positions are sharded, by resharding it over the heads.

    An all-to-all gives each rank all positions of its heads; it attends, and an all-to-all restores
    the sharding. The number of ranks must divide that of the key heads.

    Shape: q [..., t/n, h, d], k [..., t/n, g, d], v [..., t/n, g, e] gives [..., t/n, h, e], n
    dividing g and g dividing h. Types: all are sharded over `axis` along dimension -3, as is the
    result. Backward: four all-to-alls as well. Sends (n-1)/n times the bytes of q, k, v and the
    result, forward and backward.

    Args:
        q: queries of this rank's positions.
        k: keys of this rank's positions.
        v: values of this rank's positions.
        axis: the axis over which the sequence is sharded.
        causal: whether a position sees only itself and those before.
        positions: as in `ring_attention`; work is balanced anyway, since each rank has all
            positions.
        scale: of the scores; by default 1 / sqrt(d).

    Raises:
        LayerError: shapes that do not match, or heads that do not divide over the ranks.
        CollectiveError: outside a body, or an unknown axis.

    Source: Jacobs et al. 2023, "DeepSpeed Ulysses".

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("cp",), kind="simulated")
        >>> f = lambda v: ulysses_attention(torch.zeros_like(v), torch.zeros_like(v), v, "cp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("cp"),), out_specs=P("cp"))
        >>> g(torch.tensor([1.0, 3.0]).reshape(2, 1, 1).expand(2, 2, 1)).squeeze()
        tensor([[1., 1.],
                [2., 2.]])
    """
    _check_shapes("ulysses_attention", q, k, v, positions)
    check_shards("ulysses_attention", "key heads", k.shape[-2], axis)
    heads, time = q.ndim - 2, q.ndim - 3
    q, k, v = (all_to_all(x, axis, split_dim=heads, concat_dim=time) for x in (q, k, v))
    if causal and positions is not None:
        at = all_gather(positions, axis, dst=R)
        y = attention(q, k, v, mask=at.unsqueeze(-1) >= at, scale=scale)
    else:
        y = attention(q, k, v, causal=causal, scale=scale)
    return all_to_all(y, axis, split_dim=time, concat_dim=heads)


def _check_shapes(name: str, q: Tensor, k: Tensor, v: Tensor, positions: Tensor | None) -> None:
    alike = (
        q.ndim == k.ndim == v.ndim >= 3
        and q.shape[:-2] == k.shape[:-2] == v.shape[:-2]
        and k.shape[-2] == v.shape[-2]
        and q.shape[-1] == k.shape[-1]
    )
    if not alike or q.shape[-2] % k.shape[-2]:
        raise LayerError(
            f"{name} takes q [..., t/n, h, d], k [..., t/n, g, d] and v [..., t/n, g, e] with g "
            f"dividing h, not {show_shapes(q, k, v)}."
        )
    if positions is not None and positions.shape != q.shape[-3:-2]:
        raise LayerError(
            f"{name}: positions {list(positions.shape)} must be [{q.shape[-3]}], one for each of "
            "this rank's."
        )


# Steps of `ring_attention` on one rank, forward and backward. At step s a rank has the keys and
# values of the rank s positions before it. A step is a list of `Block`s, each a pair of chunks of
# queries and keys; forward and backward run the same blocks. Shapes: q [..., c, t, g, r, d] with c
# chunks of t positions and r query heads per key head, k and v [..., c, t, g, 1, d].

_CHUNK: Final = -5

Chunk: TypeAlias = Tensor | int
"""Number of a chunk, which may vary from rank to rank if it is a tensor [1]."""


@dataclass(frozen=True)
class Block:
    """Queries that attend to keys; `sees` is the mask [queries, keys], None without one."""

    queries: Chunk
    keys: Chunk
    sees: Tensor | None = None


def ring(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    positions: Tensor | None,
    axis: Axis,
    causal: bool,
    balanced: bool,
    scale: float,
) -> Tensor:
    """Attends: q [..., t, h, d], k [..., t, g, d], v [..., t, g, e] -> [..., t, h, e]."""
    count, length = axis_size(axis), q.shape[-3]
    if positions is None:
        table = torch.arange(count * length, device=q.device).reshape(count, length)
    else:
        table = all_gather(positions, axis, tiled=False, dst=R)
    ring = _Steps(axis, causal, balanced and count > 1, scale)
    grouped = q.unflatten(-2, (k.shape[-2], q.shape[-2] // k.shape[-2]))
    operands = (grouped, k.unsqueeze(-2), v.unsqueeze(-2))
    chunks = [x.unflatten(_CHUNK + 1, (ring.num_chunks, -1)) for x in operands]
    y, _ = _Ring.apply(*chunks, table, ring)
    result: Tensor = y.flatten(_CHUNK, _CHUNK + 1).flatten(-3, -2)
    if ring.balanced and positions is not None:
        result = result.masked_fill(positions.ne(_head_tail(count, length, axis)).any(), torch.nan)
    return result


def _head_tail(count: int, length: int, axis: Axis) -> Tensor:
    """Computes the positions of this rank in `head_tail_order`."""
    rank, half = axis_index(axis), length // 2
    own = torch.arange(half, device=rank.device)
    return torch.cat([rank * half + own, (2 * count - 1 - rank) * half + own])


@dataclass(frozen=True)
class _Steps:
    """Plan of the steps: the blocks of each."""

    axis: Axis
    causal: bool
    balanced: bool
    scale: float

    @property
    def num_chunks(self) -> int:
        """Counts the chunks of a rank: the head and the tail of `head_tail_order`, or one."""
        return 1 + self.balanced

    def blocks(self, step: int, table: Tensor) -> list[Block]:
        """Returns the blocks of a step; `table` has the positions of all ranks.

        In a balanced ring every tail sees every head. The head of a rank before this one is seen by
        our head as well; the tail of a rank after this one is seen by our tail.
        """
        if not self.causal:
            return [Block(0, 0)]
        rank = axis_index(self.axis)
        source = (rank - step) % table.shape[0]
        visible = [Block(1, 0)] if self.balanced else []
        if self.balanced and step:
            same = (source > rank).long().reshape(1)
            return [*visible, Block(same, same)]
        own, attended = (
            table.index_select(0, at.reshape(1)).reshape(self.num_chunks, -1)
            for at in (rank, source)
        )
        masks = (own.unsqueeze(-1) >= attended.unsqueeze(-2)).unbind()
        return [*visible, *[Block(chunk, chunk, sees) for chunk, sees in enumerate(masks)]]


def _take(x: Tensor, chunk: Chunk) -> Tensor:
    if isinstance(chunk, int):
        return x.select(_CHUNK, chunk)
    return x.index_select(_CHUNK, chunk).squeeze(_CHUNK)


def _put(x: Tensor, chunk: Chunk, new: Tensor) -> Tensor:
    if x.shape[_CHUNK] == 1:
        return new.unsqueeze(_CHUNK)
    at = torch.arange(x.shape[_CHUNK], device=x.device) == chunk
    return torch.where(at.reshape(-1, 1, 1, 1, 1), new.unsqueeze(_CHUNK), x)


def _add(total: Tensor, chunk: Chunk, part: Tensor) -> Tensor:
    return _put(total, chunk, _take(total, chunk) + part)


class _Ring(Function):
    """Autograd Function: the attention, and the logsumexp of its scores [..., c, t, g, r, 1]."""

    @staticmethod
    def forward(
        q: Tensor, k: Tensor, v: Tensor, table: Tensor, steps: _Steps
    ) -> tuple[Tensor, Tensor]:
        least = torch.finfo(q.dtype).min
        y = torch.zeros_like(q[..., :1]) * v[..., :1, :]
        total = torch.full_like(q[..., :1], least)
        for step, keys, values in _round(k, v, table, steps):
            for block in steps.blocks(step, table):
                mine = block.queries
                scores = _scores(block, q, keys, steps.scale)
                log_sum = scores.logsumexp(-1, keepdim=True)
                attended = _sum_over_keys((scores - log_sum).exp(), _take(values, block.keys))
                before = _take(total, mine)
                grown = torch.logaddexp(before, log_sum)
                y_own = _take(y, mine) * (before - grown).exp()
                y = _put(y, mine, y_own + attended * (log_sum - grown).exp())
                total = _put(total, mine, grown)
        return y, total

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        q, k, v, table, ctx.steps = inputs
        ctx.save_for_backward(q, k, v, table, *output)

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_total: Tensor) -> tuple[Tensor | None, ...]:
        """Passes through the ring again; the gradients of keys and values are sent along.

        A second derivative flows through the saved logsumexp, which therefore has a gradient.
        """
        q, k, v, table, y, total = ctx.saved_tensors
        steps = ctx.steps
        drift = (d_y * y).sum(-1, keepdim=True) - d_total
        d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
        for step, keys, values in _round(k, v, table, steps):
            if step:
                d_k, d_v = _shifted(d_k, d_v, steps.axis)
            for block in steps.blocks(step, table):
                mine, theirs = block.queries, block.keys
                scores = _scores(block, q, keys, steps.scale)
                weights = (scores - _take(total, mine)).exp()
                d_own = _take(d_y, mine)
                d_weights = torch.einsum("...tgre,...sgue->...tgrs", d_own, _take(values, theirs))
                d_scores = weights * (d_weights - _take(drift, mine)) * steps.scale
                d_q = _add(d_q, mine, _sum_over_keys(d_scores, _take(keys, theirs)))
                d_k = _add(d_k, theirs, _sum_over_queries(d_scores, _take(q, mine)))
                d_v = _add(d_v, theirs, _sum_over_queries(weights, d_own))
        d_k, d_v = _shifted(d_k, d_v, steps.axis)  # back to the rank that owns them
        return d_q, d_k, d_v, None, None


def _round(
    k: Tensor, v: Tensor, table: Tensor, steps: _Steps
) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields the keys and values of one rank after the other, starting with this one."""
    for step in range(table.shape[0]):
        if step:
            k, v = _shifted(k, v, steps.axis)
        yield step, k, v


def _shifted(k: Tensor, v: Tensor, axis: Axis) -> tuple[Tensor, Tensor]:
    """Sends both to the next rank, in one message."""
    both = shift(torch.cat([k, v], -1), axis, 1)
    keys, values = both.split([k.shape[-1], v.shape[-1]], -1)
    return keys, values


def _scores(block: Block, q: Tensor, k: Tensor, scale: float) -> Tensor:
    """Computes scores [..., t, g, r, s]; the least number where a query does not see a key."""
    own, attended = _take(q, block.queries), _take(k, block.keys)
    scores = torch.einsum("...tgrd,...sgud->...tgrs", own, attended)
    scores = scores * scale
    if block.sees is None:
        return scores
    return scores.masked_fill(~block.sees[:, None, None, :], torch.finfo(scores.dtype).min)


def _sum_over_keys(weights: Tensor, values: Tensor) -> Tensor:
    """Sums over keys: [..., t, g, r, s] and [..., s, g, 1, e] -> [..., t, g, r, e]."""
    return torch.einsum("...tgrs,...sgue->...tgre", weights, values)


def _sum_over_queries(weights: Tensor, x: Tensor) -> Tensor:
    """Sums over queries: [..., t, g, r, s] and [..., t, g, r, e] -> [..., s, g, 1, e]."""
    return torch.einsum("...tgrs,...tgre->...sge", weights, x).unsqueeze(-2)

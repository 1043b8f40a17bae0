"""Attention over a sharded sequence (context parallelism): ring attention and Ulysses."""

import math

import torch
from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.nn.attention import attention, show_shapes
from shardmap_torch.nn.core.arguments import check_shards
from shardmap_torch.nn.core.region import PerRank, per_rank
from shardmap_torch.nn.core.ring import ring
from shardmap_torch.ops import all_gather, all_to_all
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import R


def head_tail_order(length: int, num_ranks: int) -> Tensor:
    """Returns the order of positions in which equal shards do equal work in causal attention.

    The sequence is divided into 2n chunks, and rank r of n gets chunks r and 2n - 1 - r: one that
    sees little and one that sees much. Apply it outside of the body, to tokens and targets alike
    (`tokens[:, order]`), and pass `order` itself, sharded in the same way, as `positions`.

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
    of these if balanced. Backward: 2n - 1 steps of the ring. Sends (n-1) times the
    bytes of k and v forward, and about twice as much backward.

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

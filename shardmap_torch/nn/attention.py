"""Attention over the heads of one rank, with grouped queries, and caches for decoding."""

import math

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.core.functorch import num_derivatives
from shardmap_torch.core.torch_private.engine import forward_level
from shardmap_torch.errors import LayerError
from shardmap_torch.nn.arguments import check_shards
from shardmap_torch.nn.region import PerRank, per_rank
from shardmap_torch.ops import axis_index
from shardmap_torch.ops.arguments import Axis


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    causal: bool = False,
    mask: Tensor | None = None,
    offset: Tensor | int | None = None,
    scale: float | None = None,
) -> Tensor:
    """Attends with each query head to the keys of its key head.

    Heads are independent, so that nothing is communicated: with heads sharded over an axis each
    rank computes its own. Where there are fewer key heads than query heads (grouped queries), each
    serves as many query heads in a row; with fewer key heads than ranks, `own_kv_heads` gives each
    rank those that it needs.

    Shape: q [..., t, h, d], k [..., s, g, d], v [..., s, g, e], g dividing h, gives [..., t, h, e].
    Types: those of q, k and v, which are sharded alike; t, s, d and e are not sharded. Sends
    nothing, forward and backward.

    Args:
        q: queries.
        k: keys.
        v: values.
        causal: whether query i sees only keys 0 to i + offset.
        mask: booleans that broadcast to [..., h, t, s]; true where a query may see a key.
        offset: the position of the first query among the keys, an integer tensor or a number;
            by default 0. For decoding with a cache, where queries follow the cached positions.
        scale: of the scores; by default 1 / sqrt(d).

    Raises:
        LayerError: shapes that do not match, or a mask that is not boolean.

    Source: Vaswani et al. 2017; `torch.nn.functional.scaled_dot_product_attention`, whose dims are
    [..., h, t, d]; grouped queries: Ainslie et al. 2023.

    Example:
        >>> q = torch.zeros(1, 2, 4, 1)  # 2 positions, 4 heads
        >>> k = torch.zeros(1, 2, 2, 1)  # 2 key heads
        >>> v = torch.tensor([1.0, 3.0]).reshape(1, 2, 1, 1).expand(1, 2, 2, 1)
        >>> attention(q, k, v, causal=True).squeeze()
        tensor([[1., 1., 1., 1.],
                [2., 2., 2., 2.]])
    """
    _check_shapes(q, k, v)
    groups = q.shape[-2] // k.shape[-2]
    q, k, v = (x.transpose(-2, -3) for x in (q, _repeated(k, groups), _repeated(v, groups)))
    is_square = causal and offset is None and q.shape[-2] == k.shape[-2]
    is_plain = mask is None and (is_square or not causal)
    if is_plain and (scale is None or scale > 0) and _has_kernel():  # kernels scale -inf too
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=is_square, scale=scale)
    else:
        visible = _visible_keys(q, k, causal, mask, offset)
        scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
        y = _unfused(q, k, v, visible, scale, is_plain)
    return y.transpose(-2, -3)


def _has_kernel() -> bool:
    """Returns whether torch's fused kernels serve, which keep no scores in memory.

    They have one derivative, backward. With a mask global strictness has no rule for them.
    """
    is_traced = torch.compiler.is_dynamo_compiling()
    return is_traced or (forward_level() < 0 and num_derivatives() < 2)


def own_kv_heads(kv: Tensor, axis: Axis, num_heads: int) -> Tensor:
    """Selects the key or value heads of each rank's query heads, if there are fewer than ranks.

    The weights of keys and values are then equal on all ranks, which compute all of their heads;
    use `column_linear(..., src=R)` or a plain matmul with weights of type R.

    Shape: kv [..., g, d] gives [..., num_heads/r, d] on each of r ranks, one head for each query
    head. Types: R over `axis` becomes sharded along the heads (S(-2)). Backward: the gradient of
    kv is a pending sum over `axis`. Sends nothing.

    Args:
        kv: all key heads, or all value heads.
        axis: the axis over which query heads are sharded.
        num_heads: the number of query heads on all ranks together.

    Raises:
        LayerError: the number of query heads does not divide over the ranks or the key heads.
        CollectiveError: outside a body, or an unknown axis.

    Source: Megatron-LM, `num_query_groups` below the tensor-parallel size.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("tp",), kind="simulated")
        >>> f = lambda kv: own_kv_heads(kv, "tp", 4)
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(replicate="tp"),), out_specs=P("tp"))
        >>> g(torch.tensor([[1.0], [2.0]])).squeeze()
        tensor([1., 1., 2., 2.])
    """
    check_shards("own_kv_heads", "query heads", num_heads, axis)
    if kv.ndim < 2 or num_heads % kv.shape[-2]:
        raise LayerError(
            f"own_kv_heads: {num_heads} query heads are no multiple of the key heads of "
            f"{list(kv.shape)}, which are its dimension -2."
        )
    own: Tensor = selected_heads(axis, num_heads)(kv)
    return own


def selected_heads(axis: Axis, num_heads: int) -> PerRank:
    """Makes the per-rank function of `own_kv_heads`."""

    @per_rank("...gd->...hd", over={"h": axis})
    def key_heads_of_own_queries(kv: Tensor) -> Tensor:
        count = check_shards("own_kv_heads", "query heads", num_heads, axis)
        heads = axis_index(axis) * count + torch.arange(count, device=kv.device)
        return kv.index_select(-2, heads // (num_heads // kv.shape[-2]))

    return key_heads_of_own_queries


def _repeated(kv: Tensor, groups: int) -> Tensor:
    """Repeats each key head for the query heads that it serves."""
    if groups == 1:
        return kv
    expanded = kv.unsqueeze(-2).expand(*kv.shape[:-1], groups, kv.shape[-1])
    return expanded.flatten(-3, -2)


def _visible_keys(
    q: Tensor, k: Tensor, causal: bool, mask: Tensor | None, offset: Tensor | int | None
) -> Tensor | None:
    """Returns the mask of the keys that each query sees; None if it sees all."""
    if not causal:
        return mask
    queries = torch.arange(q.shape[-2], device=q.device) + (0 if offset is None else offset)
    past = torch.arange(k.shape[-2], device=q.device) <= queries.unsqueeze(-1)
    return past if mask is None else past & mask


def _unfused(
    q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, sees_some: bool
) -> Tensor:
    """Computes `scaled_dot_product_attention` with all scores in memory.

    `sees_some`: whether each query sees a key. Adding then takes a tenth of the time of filling,
    and nothing backward.
    """
    scores: Tensor = q @ k.mT
    if visible is None:
        return (scores * scale).softmax(-1) @ v
    hidden = ~visible
    if sees_some:
        bias = scores.new_zeros(hidden.shape).masked_fill(hidden, -math.inf)
        return (scores * scale + bias).softmax(-1) @ v
    scores = (scores * scale).masked_fill(hidden, torch.finfo(scores.dtype).min)
    weights = scores.softmax(-1).masked_fill(hidden, 0.0)  # a query that sees nothing gets zeros
    return weights @ v


def show_shapes(q: Tensor, k: Tensor, v: Tensor) -> str:
    """Formats the shapes of an attention's operands for errors.

    Not before one is sure: to format a size asks for its value, and a verdict for many sizes would
    hold for that one alone.
    """
    return f"q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"


def _check_shapes(q: Tensor, k: Tensor, v: Tensor) -> None:
    if min(q.ndim, k.ndim, v.ndim) < 3 or k.shape[:-1] != v.shape[:-1] or q.ndim != k.ndim:
        raise LayerError(
            "attention takes q [..., t, h, d], k [..., s, g, d] and v [..., s, g, e], not "
            f"{show_shapes(q, k, v)}."
        )
    if q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        raise LayerError(
            f"attention: {show_shapes(q, k, v)}: the key heads (dimension -2) must divide the "
            "query heads, and the last dimension of q and k must be the same. Where key heads are "
            "fewer than ranks, use own_kv_heads."
        )


def kv_update(
    cache: Tensor, new: Tensor, position: Tensor | int | None = None, *, dim: int = -3
) -> Tensor:
    """Returns a copy of a cache with new keys or values in it.

    With a position the cache keeps its length: one program serves all positions if these are
    tensors, where a Python number or a growing cache is a new program for each value.

    Shape: cache [..., s, g, d], new [..., t, g, d] gives [..., s, g, d], or without a position
    [..., s + t, g, d]. Types: cache and new are sharded alike, and not along s and t; the position
    is equal on all ranks. Sends nothing. Reads and writes all of the cache.

    Args:
        cache: keys or values of all positions; without `position`, of those so far.
        new: keys or values at `position` and the ones after it.
        position: an integer tensor of one element, or a number. Out of the cache's range a number
            is an error, and a tensor makes the new rows NaN: it cannot raise an error without
            waiting for the device.
        dim: the dimension of the positions.

    Raises:
        LayerError: shapes that do not match, or a number out of range.

    Source: `jax.lax.dynamic_update_slice_in_dim`.

    Example:
        >>> cache, new = torch.zeros(4, 1, 1), torch.ones(2, 1, 1)
        >>> kv_update(cache, new, torch.tensor(1)).flatten()
        tensor([0., 1., 1., 0.])
        >>> kv_update(cache, new).flatten()
        tensor([0., 0., 0., 0., 1., 1.])
    """
    at = _check_cache(cache, new, dim)
    if position is None:
        return torch.cat([cache, new], at)
    length, count = cache.shape[at], new.shape[at]
    if isinstance(position, int):
        _check_room(position, length, count)
        start: Tensor | int = position
    else:
        start = position.reshape(()).clamp(0, length - count)
        new = new.masked_fill(start != position.reshape(()), torch.nan)
    row = torch.arange(length, device=cache.device) - start
    inside = ((row >= 0) & (row < count)).reshape(-1, *[1] * (cache.ndim - at - 1))
    rows = new if count == 1 else new.index_select(at, row.clamp(0, max(count - 1, 0)))
    return rows.where(inside, cache)


def _check_cache(cache: Tensor, new: Tensor, dim: int) -> int:
    """Checks the shapes; returns `dim` counted from the front."""
    if cache.ndim == new.ndim and -cache.ndim <= dim < cache.ndim:
        at = dim % cache.ndim
        others = [size for i, size in enumerate(cache.shape) if i != at]
        same = others == [size for i, size in enumerate(new.shape) if i != at]
        if same and cache.dtype == new.dtype and new.shape[at]:
            return at
    raise LayerError(
        f"kv_update: cache {cache.dtype} {list(cache.shape)} and new {new.dtype} "
        f"{list(new.shape)} must have the same dtype and sizes but in dimension {dim}, where new "
        "has at least one position."
    )


def _check_room(position: int, length: int, count: int) -> None:
    if not 0 <= position <= length - count:
        raise LayerError(
            f"kv_update: {count} positions from {position} on do not lie in a cache of {length}. "
            "Make a longer cache, or let it grow: position=None."
        )

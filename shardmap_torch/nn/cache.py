"""Caches of keys and values for decoding, of fixed or growing length."""

import torch
from torch import Tensor

from shardmap_torch.errors import LayerError


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
    at = _check_shapes(cache, new, dim)
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


def _check_shapes(cache: Tensor, new: Tensor, dim: int) -> int:
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

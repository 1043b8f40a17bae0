"""Random numbers of several distributions, each a pure function of a key."""

import math
from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.errors import ShardMapError
from shardmap_torch.random.blocks import threefry
from shardmap_torch.random.keys import Key, check_key
from shardmap_torch.random.positions import positions
from shardmap_torch.spec import P

_WORD: Final = 0xFFFFFFFF
_DIGITS: Final = {
    torch.float64: 52,
    torch.float32: 23,
    torch.float16: 10,
    torch.bfloat16: 7,
}
"""Bits of a number in [0, 1), as many as the fraction of the dtype has."""


def bits(
    key: Key,
    shape: Sequence[int] = (),
    *,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws 64 random bits per entry; all other draws are computed from these.

    Shape: int64 of `shape`; with `spec` of the shape of a shard. The types are those of the key,
    and S(i) over the axes of `spec`. Sends nothing.

    Args:
        key: draw from it once.
        shape: of the result; with `spec` the global one.
        spec: how the result is sharded: each rank draws its own shard of what one device draws
            from the same key. None draws `shape` on each rank, equal where the key is equal.
        device: of the result, by default that of the key.

    Raises:
        SpecError: `spec` does not divide `shape`, or names a partial axis.
        CollectiveError: `spec` names axes outside a body, or axes that are not bound in it.
        ShardMapError: `key` is no key, or several.

    Source: `jax.random.bits`, with partitionable Threefry.

    Example:
        >>> from shardmap_torch import random
        >>> random.bits(random.key(0), (2,))
        tensor([7719171245655871230, 3989946895414531357])
    """
    if check_key("bits", key).ndim:
        raise ShardMapError(
            f"A draw takes one key, and this is a tensor of {list(key.shape)}. Draw from each with "
            "torch.func.vmap, or take one: keys[i]."
        )
    return threefry(key, positions(shape, spec, device=device or key.device))


def _fractions(
    key: Key,
    shape: Sequence[int],
    dtype: torch.dtype | None,
    spec: P | None,
    device: torch.device | str | None,
) -> Tensor:
    """Draws uniformly from [0, 1): multiples of 2**-d with d bits, exact in the dtype."""
    dtype = dtype or torch.get_default_dtype()
    digits = _DIGITS.get(dtype)
    if digits is None:
        raise ShardMapError(f"Random numbers are drawn in a real floating dtype, not in {dtype}.")
    drawn = bits(key, shape, spec=spec, device=device)
    if digits > 32:
        numerators = drawn >> 64 - digits & (1 << digits) - 1
    else:
        numerators = ((drawn >> 32) ^ drawn & _WORD) >> 32 - digits & (1 << digits) - 1
    return numerators.to(dtype) * 2.0**-digits


def uniform(
    key: Key,
    shape: Sequence[int] = (),
    *,
    low: float = 0.0,
    high: float = 1.0,
    dtype: torch.dtype | None = None,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws numbers that are equally distributed in [low, high).

    Shape: `shape`; with `spec` the shape of a shard. The types are those of the key, and S(i) over
    the axes of `spec`. Sends nothing.

    Args:
        key: draw from it once.
        shape: of the result; with `spec` the global one.
        low: smallest value.
        high: bound that is not reached, up to rounding.
        dtype: floating; by default torch's default dtype.
        spec: how the result is sharded; see `bits`.
        device: of the result, by default that of the key.

    Raises:
        SpecError, CollectiveError, ShardMapError: as `bits`; or `dtype` is not floating.

    Source: `jax.random.uniform`, whose numbers these are in float32 and float64.

    Example:
        >>> from shardmap_torch import random
        >>> random.uniform(random.key(0), (2,))
        tensor([0.9477, 0.9786])
    """
    drawn = _fractions(key, shape, dtype, spec, device)
    if (low, high) == (0.0, 1.0):
        return drawn
    return (drawn * (high - low) + low).clamp(min=low)


def normal(
    key: Key,
    shape: Sequence[int] = (),
    *,
    dtype: torch.dtype | None = None,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws from the normal distribution of mean 0 and variance 1.

    Shape: `shape`; with `spec` the shape of a shard. The types are those of the key, and S(i) over
    the axes of `spec`. Sends nothing.

    Args:
        key: draw from it once.
        shape: of the result; with `spec` the global one.
        dtype: floating; by default torch's default dtype. Half precisions are rounded float32.
        spec: how the result is sharded; see `bits`.
        device: of the result, by default that of the key.

    Raises:
        SpecError, CollectiveError, ShardMapError: as `bits`; or `dtype` is not floating.

    Source: `jax.random.normal`: the inverse error function of a uniform number. Equal to its
    numbers up to the rounding of that function.

    Example:
        >>> from shardmap_torch import random
        >>> random.normal(random.key(0), (2,))
        tensor([1.6226, 2.0253])
    """
    dtype = dtype or torch.get_default_dtype()
    finer = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    drawn = _fractions(key, shape, finer, spec, device)
    # From the number after -1, so that no infinity is drawn, to 1.
    least = -1.0 + torch.finfo(finer).eps / 2
    return (torch.erfinv((drawn * 2.0 + least).clamp(min=least)) * math.sqrt(2.0)).to(dtype)


def bernoulli(
    key: Key,
    p: float | Tensor = 0.5,
    shape: Sequence[int] = (),
    *,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws True with probability `p`.

    Shape: bool of `shape`; with `spec` of the shape of a shard. The types are those of the key and
    of `p`, and S(i) over the axes of `spec`. Sends nothing.

    Args:
        key: draw from it once.
        p: a number, or a tensor that broadcasts with what this rank draws.
        shape: of the result; with `spec` the global one.
        spec: how the result is sharded; see `bits`.
        device: of the result, by default that of the key.

    Raises:
        SpecError, CollectiveError, ShardMapError: as `bits`.

    Source: `jax.random.bernoulli`.

    Example:
        >>> from shardmap_torch import random
        >>> random.bernoulli(random.key(0), 0.95, (4,))
        tensor([ True, False,  True,  True])
    """
    return _fractions(key, shape, torch.float32, spec, device) < p


def randint(
    key: Key,
    low: int,
    high: int,
    shape: Sequence[int] = (),
    *,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws integers from low to high - 1, equally distributed up to (high - low) / 2**63.

    Shape: int64 of `shape`; with `spec` of the shape of a shard. The types are those of the key,
    and S(i) over the axes of `spec`. Sends nothing.

    Args:
        key: draw from it once.
        low: smallest value.
        high: above the largest value.
        shape: of the result; with `spec` the global one.
        spec: how the result is sharded; see `bits`.
        device: of the result, by default that of the key.

    Raises:
        SpecError, CollectiveError, ShardMapError: as `bits`; or `high` is not above `low`.

    Source: `jax.random.randint`, with other numbers.

    Example:
        >>> from shardmap_torch import random
        >>> random.randint(random.key(0), 1, 7, (4,))
        tensor([1, 2, 2, 5])
    """
    if high <= low:
        raise ShardMapError(f"random.randint draws from low to high - 1, and {low} >= {high}.")
    drawn = bits(key, shape, spec=spec, device=device)
    return (drawn & (1 << 63) - 1) % (high - low) + low

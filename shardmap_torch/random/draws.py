"""Random numbers of several distributions, each a pure function of a key."""

import math
from collections.abc import Sequence
from math import prod
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.errors import ShardMapError, SpecError, listing
from shardmap_torch.ops import axis_index, axis_size
from shardmap_torch.random.blocks import threefry
from shardmap_torch.random.keys import Key, check_key
from shardmap_torch.spec import P, mismatches

_WORD: Final = 0xFFFFFFFF
_DIGITS: Final = {torch.float64: 52, torch.float32: 23, torch.float16: 10, torch.bfloat16: 7}
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
    return threefry(key, iota(shape, spec, device=device or key.device))


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

    Shape, types, bytes: as of `bits`, in a floating dtype.

    `low` may be drawn, and `high` not, up to rounding; `dtype` is by default torch's. For the other
    arguments, and errors, see `bits`.

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

    Shape, types, bytes: as of `bits`, in a floating dtype.

    `dtype` is by default torch's; half precisions are rounded float32. For the other arguments,
    and errors, see `bits`.

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

    Shape, types, bytes: as of `bits`, joined with the types of `p`; bools.

    `p` is a number, or a tensor that broadcasts with what this rank draws. For the other arguments,
    and errors, see `bits`.

    Source: `jax.random.bernoulli`.

    Example:
        >>> from shardmap_torch import random
        >>> random.bernoulli(random.key(0), 0.95, (4,))
        tensor([ True, False,  True,  True])
    """
    return _fractions(key, shape, torch.float32, spec, device) < p


def randint(
    key: Key,
    shape: Sequence[int] = (),
    *,
    low: int = 0,
    high: int,
    spec: P | None = None,
    device: torch.device | str | None = None,
) -> Tensor:
    """Draws integers from low to high - 1, equally distributed up to (high - low) / 2**63.

    Shape, types, bytes: as of `bits`.

    For the other arguments, and errors, see `bits`.

    Source: `jax.random.randint`, with other numbers.

    Example:
        >>> from shardmap_torch import random
        >>> random.randint(random.key(0), (4,), low=1, high=7)
        tensor([1, 2, 2, 5])
    """
    if high <= low:
        raise ShardMapError(f"random.randint draws from low to high - 1, and {low} >= {high}.")
    drawn = bits(key, shape, spec=spec, device=device)
    return (drawn & (1 << 63) - 1) % (high - low) + low


def dropout(
    key: Key, x: Tensor, p: float = 0.5, *, spec: P | None = None, training: bool = True
) -> Tensor:
    """Sets entries to zero with probability `p`, and divides the others by 1 - p.

    Shape: that of `x`. The mask has the types of the key, and is S(i) over the axes of `spec`; the
    result joins them with those of `x`. Sends nothing.

    Args:
        key: draw from it once; a key of type K gives equal masks on all ranks, one that is folded
            over an axis gives each of its ranks another mask.
        x: of a floating dtype.
        p: probability that an entry is dropped.
        spec: how `x` is sharded: the mask is this rank's shard of the mask for the global `x`, as
            one device draws it. The right choice for activations; also under check="global".
        training: False returns `x` as it is.

    Raises:
        ShardMapError: `p` is not in [0, 1), or `key` is no key.
        SpecError: `spec` has more entries than `x` has dims, or names a partial axis.
        CollectiveError: `spec` names axes outside a body, or axes that are not bound in it.

    Source: `torch.nn.functional.dropout`, `flax.linen.Dropout`.

    Example:
        >>> from shardmap_torch import P, make_mesh, random, shard_map
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check="global")
        ... def f(key, x):
        ...     return random.dropout(key, x, 0.5, spec=P("dp"))
        >>> x, key = torch.ones(2, 4), random.key(1)
        >>> torch.equal(f(key, x), random.dropout(key, x, 0.5))
        True
    """
    if not 0.0 <= p < 1.0:
        raise ShardMapError(f"random.dropout: p is a probability in [0, 1), not {p}.")
    if not training or p == 0.0:
        return x
    mask = bernoulli(key, 1.0 - p, _global_shape(x, spec), spec=spec, device=x.device)
    return torch.where(mask, x / (1.0 - p), 0.0)


def _global_shape(x: Tensor, spec: P | None) -> list[int]:
    sizes = list(x.shape)
    if spec is None:
        return sizes
    if len(spec.entries) > x.ndim:
        raise SpecError(f"random.dropout: {spec!r} is for more dims than the {x.ndim} of x.")
    for dim, axes in spec.sharded_dims:
        sizes[dim] *= axis_size(axes)
    return sizes


def iota(
    shape: Sequence[int], spec: P | None = None, *, device: torch.device | str | None = None
) -> Tensor:
    """Returns the row-major indices, in a global tensor, of the entries of this rank's shard.

    Shape: int64 of the shape of a shard: `shape`, divided along each dim by the ranks of the axes
    that shard it. S(i) over the axes of `spec`, K over all others. Sends nothing.

    Args:
        shape: the global shape.
        spec: how it is sharded; None where each rank has the unsharded tensor.
        device: of the result.

    Raises:
        SpecError: `spec` does not divide `shape`, or names a partial axis.
        CollectiveError: `spec` names axes outside a body, or axes that are not bound in it.

    Source: `jax.lax.broadcasted_iota`, sharded.

    Example:
        >>> from shardmap_torch import P, make_mesh, random, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda: random.iota((2, 4), P(None, "tp"))
        >>> shard_map(f, mesh=mesh, in_specs=(), out_specs=P("tp"))()
        tensor([[0, 1],
                [4, 5],
                [2, 3],
                [6, 7]])
    """
    shape = tuple(shape)
    if spec is None or not spec.sharded_dims:
        return torch.arange(prod(shape), device=device).reshape(shape)
    _check(shape, spec)
    axes_of = dict(spec.sharded_dims)
    numbers = torch.zeros((), dtype=torch.int64, device=device)
    for dim, size in enumerate(shape):
        if axes := axes_of.get(dim):
            # A rank's positions as check="global" knows them: a range from its own start.
            length = size // axis_size(axes)
            start = axis_index(axes).to(numbers.device) * length
            along = torch.arange(length, device=device) + start
        else:
            along = torch.arange(size, device=device)
        numbers = numbers.unsqueeze(-1) * size + along
    return numbers


def _check(shape: tuple[int, ...], spec: P) -> None:
    sizes = {axis: axis_size(axis) for axis in spec.mentioned}
    problems = mismatches(spec, shape, sizes)
    if spec.partial:
        problems.append(f"{spec!r} names partial axes, and numbers drawn are no sums")
    if problems:
        raise SpecError(listing(f"random: {spec!r} does not match shape {list(shape)}:", problems))

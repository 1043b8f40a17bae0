"""Keys of random numbers: made from a seed, split, and folded with numbers or axes."""

import zlib
from typing import Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.errors import ShardMapError
from shardmap_torch.ops import axis_index
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.random.blocks import threefry

Key: TypeAlias = Tensor
"""An int64 scalar tensor, all of whose 64 bits count."""

_SIGN: Final = 1 << 63


def key(seed: int, *, device: torch.device | str | None = None) -> Key:
    """Makes a key from a seed.

    Outside of a body, where it may be passed as an argument with spec `P()`, or in one, where it
    is of type K: equal on all ranks.

    Args:
        seed: any integer; its lowest 64 bits count.
        device: of the key, and by default of what is drawn from it.

    Returns:
        An int64 scalar. Sends nothing.

    Raises:
        SpecError: the seed is no integer.

    Source: `jax.random.key`.

    Example:
        >>> key(42)
        tensor(42)
    """
    return torch.tensor(((seed + _SIGN) & (2 * _SIGN - 1)) - _SIGN, device=device)


def split(key: Key, num: int = 2) -> Tensor:
    """Makes `num` independent keys from one, which must not be used again.

    Shape: int64 scalar -> int64 [num]. The types are those of the key. Sends nothing.

    Raises:
        ShardMapError: `key` is no key.

    Source: `jax.random.split`.

    Example:
        >>> from shardmap_torch import random
        >>> first, second = random.split(random.key(0))
        >>> first
        tensor(7719171245655871230)
    """
    return threefry(check_key("split", key), torch.arange(num, device=key.device))


def fold_in(key: Key, data: int | Tensor) -> Key:
    """Makes a key from a key and a number, such as that of a step or a layer.

    Shape: int64 scalar -> int64 scalar, or the shape of `data`. The types are those of the key,
    joined with those of `data`. Sends nothing.

    Args:
        key: the key to derive from; it may be folded with any other numbers too, but nothing is to
            be drawn from it.
        data: a number of up to 62 bits, or an integer tensor.

    Raises:
        ShardMapError: `key` is no key.

    Source: `jax.random.fold_in`.

    Example:
        >>> from shardmap_torch import random
        >>> random.fold_in(random.key(0), 1) == random.split(random.key(0))[1]
        tensor(True)
    """
    check_key("fold_in", key)
    if not isinstance(data, Tensor):
        data = torch.tensor(data, device=key.device)
    return threefry(key, data.to(torch.int64))


def fold_axis(key: Key, axis: Axis) -> Key:
    """Makes another key for each rank of `axis`; draws from it vary over `axis`.

    Shape: int64 scalar -> int64 scalar. K becomes V over `axis`, other axes keep their type. Sends
    nothing. The draws are no shards of a draw on one device, so `check="global"` refuses them; use
    `spec=` of the draws there.

    Args:
        key: the key to derive from.
        axis: the name of a mesh axis, or several: a key for each rank of them together.

    Raises:
        CollectiveError: outside a body, or unknown axis.
        ShardMapError: `key` is no key.

    Source: `jax.random.fold_in(key, jax.lax.axis_index(axis))`, with a domain of its own for each
    axis, so that folding over "dp" and over "tp" gives other keys where the indices are equal.

    Example:
        >>> from shardmap_torch import P, make_mesh, random, shard_map
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P(),), out_specs=P("dp"))
        ... def draw(key):
        ...     return random.uniform(random.fold_axis(key, "dp"), (2,))
        >>> draw(random.key(0))
        tensor([0.4646, 0.6941, 0.1212, 0.4958])
    """
    index = axis_index(axis).to(key.device)
    names = axis if isinstance(axis, str) else ",".join(axis)
    # A domain above all counters of draws and all numbers that are folded in.
    domain = 1 << 30 | zlib.crc32(names.encode()) >> 2
    return threefry(check_key("fold_axis", key), index + (domain << 32))


def check_key(function: str, key: Tensor) -> Key:
    """Requires that `key` is a key, or several.

    Raises:
        ShardMapError: it is another tensor, or none.
    """
    if not isinstance(key, Tensor) or key.dtype != torch.int64:
        what = f"a {key.dtype} tensor" if isinstance(key, Tensor) else repr(key)
        raise ShardMapError(
            f"random.{function} takes a key, an int64 scalar tensor as from random.key(seed), not "
            f"{what}."
        )
    return key

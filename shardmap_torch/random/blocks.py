"""Threefry-2x32 with 20 rounds: the counter-based generator under `shardmap_torch.random`.

A draw is a pure function of a key and a counter, so that a rank computes its own slice of a global
draw and nothing else. It is one operator, which the checker types in one step, `torch.func.vmap`
batches and torch.compile leaves alone; what it computes is written with torch's own integer
operations, and therefore the same on every device.

Source: Salmon, Moraes, Dror and Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011;
`jax.random` uses the same generator.
"""

from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.core.threefry import PARITY, ROTATIONS, WORD, threefry_of_ints

_CHUNK: Final = 1 << 16
"""Number of entries drawn at a time, so that they stay in cache for all of the 120 operations."""

_FEW: Final = 32
"""Number of entries up to which Python is faster than 120 calls of torch, 15 us each."""


def threefry(key: Tensor, counter: Tensor) -> Tensor:
    """Encrypts 64-bit counters with 64-bit keys: equally distributed, independent 64-bit blocks.

    Shape: int64 of any shapes that broadcast -> int64, the broadcast shape. Pointwise, without a
    gradient: a result varies where the key or the counter does. Sends nothing. The first word of a
    block is its upper half, in the key, the counter and the result.

    Source: Salmon et al., SC 2011, Threefry-2x32-20; `jax.extend.random.threefry_2x32`.

    Example:
        >>> hex(threefry(torch.tensor(0), torch.tensor(0)).item())
        '0x6b20015999ba4efe'
    """
    drawn: Tensor = _threefry(key, counter)
    return drawn


@torch.library.custom_op("shardmap_torch::threefry", mutates_args=(), tags=(torch.Tag.pointwise,))
def _threefry(key: Tensor, counter: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(key.shape, counter.shape)
    if counter.device.type == key.device.type == "cpu" and shape.numel() <= _FEW:
        pairs = zip(
            key.expand(shape).flatten().tolist(),
            counter.expand(shape).flatten().tolist(),
            strict=True,
        )
        blocks = [_signed(threefry_of_ints(*pair)) for pair in pairs]
        return torch.tensor(blocks, dtype=torch.int64).reshape(shape)
    return _encrypt_all(key, counter, shape)


def _signed(block: int) -> int:
    return block - (1 << 64) if block >> 63 else block


def _encrypt_all(key: Tensor, counter: Tensor, shape: torch.Size) -> Tensor:
    out = torch.empty(shape, dtype=torch.int64, device=counter.device)
    counters, blocks = counter.expand(shape).reshape(-1), out.view(-1)
    keys = key.to(out.device)
    keys = keys.reshape(()) if keys.numel() == 1 else keys.expand(shape).reshape(-1)
    for start in range(0, blocks.numel(), _CHUNK):
        part = slice(start, start + _CHUNK)
        blocks[part] = _encrypt(keys[part] if keys.ndim else keys, counters[part])
    return out


def _encrypt(key: Tensor, counter: Tensor) -> Tensor:
    """Encrypts one chunk in int32 and in place: half the memory of int64, no masks after sums."""
    keys = _words(key)
    schedule = (*keys, keys[0] ^ keys[1] ^ PARITY)
    high, low = _words(counter)
    high, low = high + keys[0], low + keys[1]
    carried = torch.empty_like(low)
    for group in range(5):
        for rotation in ROTATIONS[group % 2]:
            high.add_(low)
            # The shift of a negative number repeats its sign bit, which the mask clears.
            torch.bitwise_right_shift(low, 32 - rotation, out=carried)
            carried.bitwise_and_((1 << rotation) - 1)
            low.bitwise_left_shift_(rotation).bitwise_or_(carried).bitwise_xor_(high)
        high.add_(schedule[(group + 1) % 3])
        low.add_(schedule[(group + 2) % 3] + (group + 1))
    return high.to(torch.int64) << 32 | low.to(torch.int64) & WORD


def _words(block: Tensor) -> tuple[Tensor, Tensor]:
    return (block >> 32).to(torch.int32), block.to(torch.int32)


@_threefry.register_fake
def _shape(key: Tensor, counter: Tensor) -> Tensor:
    shape = torch.broadcast_shapes(key.shape, counter.shape)
    return torch.empty(shape, dtype=torch.int64, device=counter.device)


@_threefry.register_vmap
def _batched(
    info: Any, in_dims: tuple[int | None, int | None], key: Tensor, counter: Tensor
) -> tuple[Tensor, int]:
    num_dims = max(
        operand.ndim - (dim is not None)
        for operand, dim in zip((key, counter), in_dims, strict=True)
    )
    operands = [
        operand if dim is None else _led(operand, dim, num_dims)
        for operand, dim in zip((key, counter), in_dims, strict=True)
    ]
    return threefry(*operands), 0


def _led(operand: Tensor, dim: int, num_dims: int) -> Tensor:
    """Moves the batch dim to the front, with `num_dims` dims behind it."""
    operand = operand.movedim(dim, 0)
    missing = num_dims - (operand.ndim - 1)
    return operand.reshape(operand.shape[0], *[1] * missing, *operand.shape[1:])

"""Hashes of tensors, on their own device."""

from typing import Final

import torch
from torch import Tensor

_CHUNK: Final = 1 << 20
_FIRST: Final = -7046029254386353131  # odd, the golden ratio of 2**64
_SECOND: Final = -4658895280553007687  # odd, of splitmix64, Steele, Lea and Flood 2014


def hash_of(x: Tensor) -> Tensor:
    """Hashes values, in row-major order, to an int64 scalar on their device.

    Example:
        >>> import torch
        >>> x = torch.arange(4.0)
        >>> (hash_of(x) == hash_of(x.clone()), hash_of(x) == hash_of(x.flip(0)))
        (tensor(True), tensor(False))
    """
    parts = torch.view_as_real(x.resolve_conj()) if x.is_complex() else x
    values = parts.resolve_neg().contiguous().view(-1).view(torch.uint8)
    values = torch.nn.functional.pad(values, (0, -values.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, values.numel(), _CHUNK):
        words = values[start : start + _CHUNK]
        index = torch.arange(start + 1, start + 1 + words.numel(), device=x.device)
        mixed = (words ^ (index * _FIRST)) * _SECOND
        total = total + ((mixed ^ (mixed >> 29)) * _FIRST).sum()
    return total


_SAMPLED: Final = 4096


def sampled_hash(x: Tensor) -> str:
    """Hashes up to 8,191 evenly spaced values: all of them would take a second for some GiB.

    Example:
        >>> import torch
        >>> x = torch.arange(4.0)
        >>> sampled_hash(x) == sampled_hash(x.clone()), sampled_hash(x) == sampled_hash(x.flip(0))
        (True, False)
    """
    if x.is_meta:
        return "without data"
    flat = x.detach().reshape(-1)
    return f"{int(hash_of(flat[:: max(1, flat.numel() // _SAMPLED)])):x}"


_FEW: Final = 16


def numbers_of(literal: Tensor) -> str:
    """The numbers of a literal, or what tells them from others where they are many."""
    if literal.numel() <= _FEW:
        return f"{literal.tolist()}"
    return f"of hash {int(hash_of(literal)):x}"

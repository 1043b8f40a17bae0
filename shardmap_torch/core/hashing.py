"""Hashes of tensors, on their own device, and samples of their bits."""

import ctypes
import hashlib
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.core.functorch import base_of

_CHUNK: Final = {"cpu": 1 << 15}  # in its caches; others launch a kernel for each operation
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
    values = _words(x).contiguous().view(-1).view(torch.uint8)
    values = torch.nn.functional.pad(values, (0, -values.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    chunk = _CHUNK.get(x.device.type, 1 << 20)
    for start in range(0, values.numel(), chunk):
        words = values[start : start + chunk]
        index = torch.arange(start + 1, start + 1 + words.numel(), device=x.device)
        mixed = (words ^ (index * _FIRST)) * _SECOND
        total = total + ((mixed ^ (mixed >> 29)) * _FIRST).sum()
    return total


_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(x: Tensor) -> Tensor:
    """Returns the bits of each number as an integer, without a copy."""
    if x.is_complex():
        x = torch.view_as_real(x.resolve_conj())
    if x.is_neg():
        x = x.resolve_neg()
    word = _WORDS[x.element_size()]
    return x if x.dtype is word else x.view(word)


_SAMPLE: Final = 64


def _sample(x: Tensor, turn: int) -> Tensor:
    """Returns the bits of 64 numbers or a few more, evenly spaced, the first one by the turn."""
    words, size = _words(x), x.numel()
    if size <= _SAMPLE:
        return words.reshape(-1)
    # Odd, or all would be of one column of a matrix.
    step = size // _SAMPLE | 1
    start = turn % step
    if words.is_contiguous():
        length = (size - start + step - 1) // step
        return words.as_strided((length,), (step,), words.storage_offset() + start)
    return words.take(torch.arange(start, size, step, device=x.device))


class Bits:
    """Bits of tensors, all or a sample of each, that are read when they are needed.

    Attributes:
        is_late: whether reading them waits for a device.
    """

    def __init__(self, tensors: Sequence[Tensor], turn: int | None) -> None:
        """Begins to compute them, on the device of the tensors: of all numbers without a turn.

        Samples of another turn are of other numbers; on the CPU they take 2 to 3 us a tensor.
        """
        with torch.no_grad():
            if turn is None:
                parts = [hash_of(x).reshape(1) for x in tensors]
            else:
                parts = [_sample(x, turn) for x in tensors]
            device = next((p.device for p in parts if p.device.type != "cpu"), None)
            if device is not None:
                parts = [part.to(device, non_blocking=True) for part in parts]
            # A transform of torch.func that runs has wrapped it.
            found = base_of(torch.cat(parts).to(torch.int64))
        self._ends = [0, *accumulate([part.numel() for part in parts])]
        self._found, self._event, self.is_late = found, None, device is not None
        if device is not None:
            self._found = torch.empty(found.shape, dtype=found.dtype, pin_memory=True)
            self._found.copy_(found, non_blocking=True)
            self._event = torch.Event(device)
            self._event.record()

    def read(self) -> bytes:
        """Returns all of them, waiting for the device where it has not got so far."""
        if self._event is not None:
            self._event.synchronize()
        return ctypes.string_at(self._found.data_ptr(), self._found.nbytes)

    def digest(self) -> int:
        """Hashes them all."""
        return _hashed(self.read())

    def digests(self) -> list[int]:
        """Hashes those of each tensor."""
        found = self.read()
        return [_hashed(found[8 * start : 8 * end]) for start, end in pairwise(self._ends)]


def _hashed(found: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(found, digest_size=7).digest())


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

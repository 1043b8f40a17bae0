"""Hashes of tensors, on their own device, and samples of their bits."""

import ctypes
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal

import torch
from torch import Tensor
from torch.nn import Parameter

from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import functorch

_CHUNK: Final = 1 << 20  # so that a few of them fit in memory, at a kernel for each operation
_FIRST: Final = -7046029254386353131  # odd, the golden ratio of 2**64
_SECOND: Final = -4658895280553007687  # odd, of splitmix64, Steele, Lea and Flood 2014


def hash_of(x: Tensor) -> Tensor:
    """Hashes values, in row-major order, to an int64 scalar on their device."""
    values = _words(x).contiguous().view(-1).view(torch.uint8)
    values = torch.nn.functional.pad(values, (0, -values.numel() % 8)).view(torch.int64)
    total = torch.zeros((), dtype=torch.int64, device=x.device)
    for start in range(0, values.numel(), _CHUNK):
        words = values[start : start + _CHUNK]
        index = torch.arange(start + 1, start + 1 + words.numel(), device=x.device)
        mixed = (words ^ (index * _FIRST)) * _SECOND
        total = total + ((mixed ^ (mixed >> 29)) * _FIRST).sum()
    return total


_WORDS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _words(x: Tensor) -> Tensor:
    """Returns the bits of each number as an integer, without a copy where it lies as it is."""
    x = x.clone() if x._is_zerotensor() else x.resolve_conj().resolve_neg()  # it has no memory
    x = torch.view_as_real(x) if x.is_complex() else x
    word = _WORDS[x.element_size()]
    return x if x.dtype is word else x.view(word)


_SAMPLE: Final = 32
_OWN: Final = Tensor, Parameter
_FORMATS: Final[Mapping[int, Literal["b", "h", "i", "q"]]] = {1: "b", 2: "h", 4: "i", 8: "q"}


def _sample(x: Tensor, turn: int) -> Tensor:
    """Returns the bits of 32 numbers or a few more, evenly spaced, the first one by the turn."""
    words = _words(x)
    start, step = (0, 1) if words.numel() <= _SAMPLE else _spaced(words.numel(), turn)
    return words.take(torch.arange(start, words.numel(), step, device=x.device))


def _spaced(size: int, turn: int) -> tuple[int, int]:
    """Returns the first place of a sample, and the distance between two."""
    # Odd, or all would be of one column of a matrix.
    step = size // _SAMPLE | 1
    return turn % step, step


def _memory(x: Tensor) -> memoryview:
    """Returns contiguous memory of the CPU, as it is."""
    if not x.nbytes:
        return memoryview(b"")
    return memoryview((ctypes.c_ubyte * x.nbytes).from_address(x.data_ptr())).cast("B")


def in_memory(tensors: Sequence[Tensor], turn: int) -> list[bytes] | None:
    """Returns the bits of samples for a third of what torch's views take; None where these must do.

    One function: each that it would call is cold between the operations of a program.
    """
    found = []
    for x in tensors:
        is_own = type(x) in _OWN and x.is_cpu and x.layout is torch.strided and not x.is_nested
        if not is_own or functorch.is_functorch_wrapped_tensor(x) or not x.is_contiguous():
            return None
        if x.is_complex() or x.is_neg():
            return None
        size = x.numel()
        if size and not x.data_ptr():  # zeros that are not stored
            return None
        if size > _SAMPLE:
            start, step = _spaced(size, turn)
            found.append(_memory(x).cast(_FORMATS[x.element_size()])[start::step].tobytes())
        else:
            found.append(ctypes.string_at(x.data_ptr(), x.nbytes))
    return found


def _bits(x: Tensor, turn: int | None) -> bytes | Tensor:
    """Returns bits of a tensor; where it is on a device, a tensor that will have them."""
    with torch.no_grad():
        if turn is not None:
            found = _sample(x, turn)
        else:  # on the CPU in one pass, where torch takes one for each operation
            found = _words(x).contiguous() if x.is_cpu else hash_of(x).reshape(1)
    found = base_of(found)  # a transform of torch.func that runs has wrapped it
    if turn is None and x.is_cpu:
        return zlib.crc32(_memory(found)).to_bytes(4, "little")
    return _memory(found).tobytes() if x.is_cpu else found


def has_bits(x: Tensor) -> bool:
    """Returns whether it has data that can be read."""
    x = base_of(x)
    if x.layout is not torch.strided or x.is_meta or x.is_nested:
        return False
    # Other kinds are wrapped around tensors, or are fake; FSDP2 frees the memory of some.
    is_own = type(x) is Tensor or type(x).__torch_dispatch__ is Tensor.__torch_dispatch__
    return is_own and (x.data_ptr() != 0 or x._is_zerotensor() or not x.numel())


class Bits:
    """Bits of tensors, all or a sample of each, that are read when they are needed.

    Attributes:
        is_late: whether reading them waits for a device.
    """

    def __init__(self, tensors: Sequence[Tensor], turn: int | None, parts: Any = None) -> None:
        """Begins to compute them, on the device of the tensors: of all numbers without a turn.

        Samples of another turn, from 1 on, are of other numbers; `parts` are those `in_memory`.
        """
        parts = in_memory(tensors, turn) if turn and parts is None else parts
        self._parts: list[bytes] = parts or []
        self._events: list[tuple[int, Tensor, torch.Event]] = []
        for at, x in enumerate(tensors if parts is None else ()):
            if not isinstance(part := _bits(x, turn), bytes):
                self._events.append((at, *_begun(part)))
                part = b""
            self._parts.append(part)
        self.is_late = bool(self._events)

    def _each(self) -> list[bytes]:
        """Returns those of each tensor, waiting for the device where it has not got so far."""
        for at, copy, event in self._events:
            event.synchronize()
            self._parts[at] = _memory(copy).tobytes()
        self._events.clear()
        return self._parts

    def digest(self) -> int:
        """Hashes them all."""
        return zlib.crc32(b"".join(self._each() if self._events else self._parts))

    def digests(self) -> list[int]:
        """Hashes those of each tensor."""
        return [zlib.crc32(each) for each in self._each()]


def _begun(x: Any) -> tuple[Tensor, torch.Event]:
    """Begins to copy a tensor from its device; returns the copy, and what tells when it is done."""
    copy, event = torch.empty(x.shape, dtype=x.dtype, pin_memory=True), torch.Event(x.device)
    copy.copy_(x, non_blocking=True)
    event.record()
    return copy, event


_SAMPLED: Final = 4096


def hash_text(x: Tensor, most: int | None = None) -> str:
    """Hashes the values; of more than `most` a sample, up to twice as many evenly spaced ones."""
    if x.is_meta:
        return "without data"
    flat = x.detach().reshape(-1)
    step = 1 if most is None else flat.numel() // most | 1  # as in `_spaced`
    return f"{Bits([flat[::step]], None).digest():x}"


def values_of(x: Tensor) -> str:
    """The numbers of a tensor, or what tells them from others: of large ones a sample."""
    if not has_bits(x):
        return "without data"
    return numbers_of(x) if x.numel() <= _SAMPLED else f"of hash {hash_text(x, _SAMPLED)}"


_FEW: Final = 16


def numbers_of(literal: Tensor) -> str:
    """The numbers of a literal, or what tells them from others where they are many."""
    if literal.numel() <= _FEW:
        return f"{literal.tolist()}"
    return f"of hash {Bits([literal], None).digest():x}"

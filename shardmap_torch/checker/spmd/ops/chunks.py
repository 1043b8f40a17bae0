"""Chunks of one size that operations make of a dim: `x.chunk(n)` and `x[i * k : (i + 1) * k]`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from shardmap_torch.core.torch_private.engine import OpOverload

aten = torch.ops.aten


@dataclass(frozen=True)
class Chunks:
    """Chunks of one size that an operation makes of a dim: these, of so many."""

    size: int
    count: int
    indices: range

    @property
    def key(self) -> tuple[int, range]:
        """Returns what is the same on a rank and on one device."""
        return self.count, self.indices


def _split(arguments: Mapping[str, Any], length: int) -> Chunks | None:
    """Returns the chunks of `x.chunk(n)`."""
    size = arguments["split_size"]
    if type(size) is not int or size <= 0 or length % size:
        return None
    return Chunks(size, length // size, range(length // size))


def _sliced(arguments: Mapping[str, Any], length: int) -> Chunks | None:
    """Returns the chunk `x[i * k : (i + 1) * k]`."""
    bounds = arguments["start"], arguments["end"], arguments["step"]
    if any(type(bound) not in (int, type(None)) for bound in bounds) or type(length) is not int:
        return None
    found = range(*slice(*bounds).indices(length))
    size = len(found)
    if size in (0, length) or found.step != 1 or length % size or found.start % size:
        return None
    return Chunks(size, length // size, range(found.start // size, found.start // size + 1))


CHUNKS: Final[Mapping[OpOverload, Callable[[Mapping[str, Any], int], Chunks | None]]] = {
    aten.split.Tensor: _split,
    aten.slice.Tensor: _sliced,
}
"""Operations that make chunks, with how their arguments and a dim's length tell which."""

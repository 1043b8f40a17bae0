"""Chunks of one size of a dim: `x.chunk(n)`, `x[i * k : (i + 1) * k]`, and `x.view(n, -1)`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.layout import (
    EACH,
    Dim,
    Shape,
    ShardedTensor,
    axes_of,
    merged,
    reshape,
    unsharded,
)
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


VIEWS: Final = overloads("view _unsafe_view reshape _reshape_alias")
"""Operations that may put microbatches, or the rows of all, in dims of their own."""


def divided(x: ShardedTensor, local: Shape, there: Shape) -> tuple[Dim, ...] | None:
    """Lays out `x.view(n, -1, ...)` of a dim that ranks share; None where a view is none.

    Args:
        x: the layout of the operand.
        local: the shape of the result on a rank.
        there: its shape on one device.

    Example:
        >>> x = ShardedTensor(((("dp", 2), (None, 6)),), (6,), (12,))
        >>> divided(x, (3, 2), (3, 4))
        ((('each microbatch', 3),), (('dp', 2), (None, 2)))
    """
    sizes = zip(x.local, x.global_shape, local, there, strict=False)
    at = next((n for n, (a, b, c, d) in enumerate(sizes) if a != c or b != d), None)
    if at is None or 0 < at == len(x.dims) - 1:  # the last dim has features, and no rows
        return None
    count, axes = local[at], axes_of(x.dims[at])
    leading = x.dims[at][: len(axes)]
    if not axes or EACH in axes or axes_of(leading) != axes:
        return None
    if type(count) is not int or count != there[at] or count < 2 or x.local[at] % count:
        return None

    def between(shape: Shape) -> Shape:
        return (*shape[:at], count, shape[at] // count, *shape[at + 1 :])

    rows = (*leading, *unsharded(x.local[at] // count))
    dims = (*x.dims[:at], ((EACH, count),), rows, *x.dims[at + 1 :])
    return reshape(ShardedTensor(dims, between(x.local), between(x.global_shape)), there)


def undivided(dim: Dim, axes: tuple[str, ...]) -> Dim:
    """Lays out a dim in which the rows of all microbatches lie behind one another.

    Example:
        >>> undivided((("each microbatch", 3), ("dp", 2), (None, 2)), ("dp",))
        (('dp', 2), (None, 6))
    """
    at = next((n for n, (axis, _) in enumerate(dim) if axis == EACH), None)
    if at is None:
        return dim
    rows = dim[at + 1 : at + 1 + len(axes)]
    if tuple([axis for axis, _ in rows]) != axes:
        return dim
    return tuple(merged([*dim[:at], *rows, (None, dim[at][1]), *dim[at + 1 + len(axes) :]]))

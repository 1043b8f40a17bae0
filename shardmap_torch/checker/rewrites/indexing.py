"""Reads and writes at positions that tensors give, as in `x[axis_index("tp")] += 1`.

Torch takes the number out of a tensor of one integer and makes a view. The number is not known,
and need not be: `index_select` and `index_put` give the same value, and their rules say of which
type it is. Writes are the same operations here whatever the sizes are, so that those of the ranks
can be compared with those of one device.
"""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.rewrites.aliases import Host
from shardmap_torch.checker.rewrites.ranges import has_tensor_bounds, write_range

_WHOLE: Final = slice(None)


def read(host: Host, x: Tensor, index: Any) -> Any:
    """Computes `x[index]`, or NotImplemented where torch needs no number to do so."""
    parts = parts_of(index)
    if any(map(has_tensor_bounds, parts)):
        host.numbers.branches.refuse(
            "the size of a slice whose bounds are tensors depends on data.",
            "use torch.narrow(x, dim, start, length), whose start may be a tensor; or take all of "
            "it, and mask.",
        )
    if _is_mask(parts[0]) and all(part == _WHOLE for part in parts[1:]):
        return host.rows.selections.select(host, x, parts[0])
    if not any(map(_is_number, parts)):
        return NotImplemented
    selected, rest = x, list(parts)
    for position, part in enumerate(rest):
        if _is_number(part):
            dim = _dim(x, rest, position)
            selected = host.rows.pick(host, selected, dim, part.reshape(1))
            rest[position] = 0
    return host.rows.take(selected[tuple(rest)], x, index)


def write(host: Host, x: Tensor, index: Any, value: Any) -> Any:
    """Does `x[index] = value`, or returns NotImplemented where torch does it."""
    if host.rows.is_taken(value, x, index):
        return None
    parts = parts_of(index)
    if any(map(has_tensor_bounds, parts)):
        return write_range(host, x, parts, value)
    if not all(map(_is_known, parts)):
        return NotImplemented
    indices = [part for part in parts if isinstance(part, Tensor)]
    if indices:
        return _write_at(host, x, parts, value)
    target = x[index]
    if not isinstance(value, Tensor) or value.ndim > target.ndim:
        return NotImplemented
    target.copy_(value)
    return None


def _write_at(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> Any:
    """Writes at the places that tensors of integers or booleans give."""
    numbers = [part for part in parts if _is_number(part)]
    indices = [part for part in parts if isinstance(part, Tensor)]
    if numbers:
        host.needs_ranks()
        if len(numbers) < len(indices):
            host.numbers.branches.refuse(
                "a write at a position that a number and other tensors give together is not known "
                "to the checker.",
                "use index_put.",
            )
    basic = [[_WHOLE] * _consumed(part) if isinstance(part, Tensor) else [part] for part in parts]
    target = x[tuple(part for group in basic for part in group)]
    places: list[Tensor | None] = []
    for part in parts:
        places += _places(part, x.ndim - sum(map(_consumed, parts)))
    row = torch.as_tensor(value, dtype=x.dtype, device=x.device)
    num_kept = target.ndim - sum(map(_consumed, indices))
    num_dims = num_kept + max(1 if part.dtype in _MASKS else part.ndim for part in indices)
    while row.ndim > num_dims and row.shape[0] == 1:
        row = row.squeeze(0)
    torch.ops.aten.index_put_.default(target, places, row)
    return None


def _places(part: Any, num_free: int) -> list[Tensor | None]:
    """The entries that `index_put_` takes for one part of an index."""
    if isinstance(part, Tensor):
        return [part]
    if part is Ellipsis:
        return [None] * num_free
    return [None] if part is None or isinstance(part, slice) else []


_MASKS: Final = (torch.bool, torch.uint8)


def _is_known(part: Any) -> bool:
    """Returns whether a part of an index is one of those that are written here."""
    if isinstance(part, Tensor):
        return part.ndim > 0 or part.dtype not in _MASKS
    if isinstance(part, slice):
        return all(bound is None or type(bound) is int for bound in (part.start, part.stop))
    return part is None or part is Ellipsis or type(part) is int


def _dim(x: Tensor, parts: Sequence[Any], position: int) -> int:
    """The dim that a part of an index is about."""
    if any(part is Ellipsis for part in parts[:position]):
        return x.ndim - sum(map(_consumed, parts[position:]))
    return sum(map(_consumed, parts[:position]))


def _consumed(part: Any) -> int:
    if part is None or part is Ellipsis or isinstance(part, bool):
        return 0
    if isinstance(part, Tensor) and part.dtype in _MASKS:
        return part.ndim
    return 1


def parts_of(index: Any) -> Sequence[Any]:
    """The parts of an index, one for each dim or dims that it is about."""
    return index if isinstance(index, tuple) else (index,)


def _is_mask(part: Any) -> bool:
    return isinstance(part, Tensor) and part.dtype == torch.bool and part.ndim > 0


def _is_number(part: Any) -> bool:
    """Returns whether torch takes the index for a number; uint8 is a mask."""
    return isinstance(part, Tensor) and part.ndim == 0 and part.dtype not in _MASKS

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

from shardmap_torch.checker.rewrites.copies import Host

_WHOLE: Final = slice(None)
_MASKS: Final = (torch.bool, torch.uint8)


def read(host: Host, x: Tensor, index: Any) -> Any:
    """Computes `x[index]`, or NotImplemented where torch needs no number to do so."""
    parts = _parts_of(index)
    if any(map(_has_tensor_bounds, parts)):
        host.numbers.branches.refuse(
            "the size of a slice whose bounds are tensors depends on data.",
            "use torch.narrow(x, dim, start, length), whose start may be a tensor; or take all of "
            "it, and mask.",
        )
    if not any(map(_is_number, parts)):
        return NotImplemented
    selected, rest = x, list(parts)
    for position, part in enumerate(rest):
        if _is_number(part):
            dim = _dim(x, rest, position)
            selected = host.copies.pick(host, selected, dim, part.reshape(1))
            rest[position] = 0
    return host.copies.remember_pick(selected[tuple(rest)], x, index)


def narrow(host: Host, x: Tensor, dim: int, start: Any, length: int) -> Any:
    """Computes `torch.narrow` from a tensor's number on; NotImplemented for other starts."""
    if not isinstance(start, Tensor) or type(length) is not int:
        return NotImplemented
    return host.copies.pick(host, x, dim, start + torch.arange(length, device=x.device))


def write(host: Host, x: Tensor, index: Any, value: Any) -> Any:
    """Does `x[index] = value`, or returns NotImplemented where torch does it."""
    parts = _parts_of(index)
    if any(map(_has_tensor_bounds, parts)):
        return _write_range(host, x, parts, value)
    if not all(map(_is_known, parts)):
        return NotImplemented
    if any(isinstance(part, Tensor) for part in parts):
        with host.copies.writing_back(host, x, index, value):
            _write_at(host, x, parts, value)
        return None
    target = x[index]
    if not isinstance(value, Tensor) or value.ndim > target.ndim:
        return NotImplemented
    target.copy_(value)
    return None


def _write_at(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> None:
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
    num_others = target.ndim - sum(map(_consumed, indices))
    num_dims = num_others + max(1 if part.dtype in _MASKS else part.ndim for part in indices)
    while row.ndim > num_dims and row.shape[0] == 1:
        row = row.squeeze(0)
    torch.ops.aten.index_put_.default(target, places, row)


def _write_range(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> None:
    """Does `x[parts] = value`, where one part is a slice whose bounds are tensors."""
    at = [place for place, part in enumerate(parts) if _has_tensor_bounds(part)]
    place, others = at[0], [*parts]
    bounds, others[place] = parts[place], _WHOLE
    is_simple = all(p is None or p is Ellipsis or type(p) in (int, slice) for p in others)
    if len(at) > 1 or bounds.step not in (None, 1) or not is_simple:
        host.numbers.branches.refuse(
            "a write between bounds that are tensors is known to the checker beside integers and "
            "slices only.",
            "use index_copy, or torch.where with a mask.",
        )
    host.needs_ranks()
    target = x[tuple(others)]
    after = any(part is Ellipsis for part in others[:place])
    dim = target.ndim - _count_dims(others[place:]) if after else _count_dims(others[:place])
    row = torch.as_tensor(value, dtype=target.dtype, device=target.device)
    behind = target.ndim - 1 - dim
    length = row.shape[-1 - behind] if row.ndim > behind else 1
    if length == 1:  # one value everywhere: how many entries there are is not known
        target.copy_(torch.where(_mask(target, dim, bounds), row, target))
        return
    index = torch.arange(length, device=target.device)
    if bounds.start is not None:
        index = bounds.start + index
    if isinstance(bounds.stop, Tensor):
        index = index + 0 * bounds.stop  # what is written depends on it
    torch.ops.aten.index_put_.default(target, [None] * dim + [index], row)


def _count_dims(parts: Sequence[Any]) -> int:
    """Counts the result's dims that these parts give; none is a tensor or an ellipsis."""
    return len([part for part in parts if part is None or isinstance(part, slice)])


def _mask(target: Tensor, dim: int, bounds: slice) -> Tensor:
    """Marks the positions between the bounds, along a dim."""
    positions = torch.arange(target.shape[dim], device=target.device)
    limits = [] if bounds.start is None else [positions >= bounds.start]
    limits += [] if bounds.stop is None else [positions < bounds.stop]
    inside = limits[0] if len(limits) == 1 else limits[0] & limits[1]
    mask: Tensor = inside.reshape(-1, *(1,) * (target.ndim - 1 - dim))
    return mask


def _has_tensor_bounds(part: Any) -> bool:
    """Returns whether a slice begins or ends where a tensor says."""
    return isinstance(part, slice) and any(
        isinstance(bound, Tensor) for bound in (part.start, part.stop)
    )


def _places(part: Any, num_free: int) -> list[Tensor | None]:
    """The entries that `index_put_` takes for one part of an index."""
    if isinstance(part, Tensor):
        return [part]
    if part is Ellipsis:
        return [None] * num_free
    return [None] if part is None or isinstance(part, slice) else []


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


def _parts_of(index: Any) -> Sequence[Any]:
    """The parts of an index, one for each dim or dims that it is about."""
    return index if isinstance(index, tuple) else (index,)


def _is_number(part: Any) -> bool:
    """Returns whether torch takes the index for a number; uint8 is a mask."""
    return isinstance(part, Tensor) and part.ndim == 0 and part.dtype not in _MASKS

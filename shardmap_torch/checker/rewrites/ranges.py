"""Parts of a dim that begin where a tensor says, as in `cache[:, pos : pos + 1] = k`."""

from collections.abc import Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.rewrites.aliases import Host

_WHOLE: Final = slice(None)


def has_tensor_bounds(part: Any) -> bool:
    """Returns whether a slice begins or ends where a tensor says."""
    return isinstance(part, slice) and any(
        isinstance(bound, Tensor) for bound in (part.start, part.stop)
    )


def narrow(host: Host, x: Tensor, dim: int, start: Any, length: int) -> Any:
    """Computes `torch.narrow` from a tensor's number on; NotImplemented for other starts."""
    if not isinstance(start, Tensor) or type(length) is not int:
        return NotImplemented
    return host.rows.pick(host, x, dim, _positions(start, length, x))


def select(host: Host, x: Tensor, dim: int, index: Any) -> Any:
    """Computes `torch.select` at a tensor's number; NotImplemented for other indices."""
    if not isinstance(index, Tensor):
        return NotImplemented
    return host.rows.pick(host, x, dim, index.reshape(1)).select(dim, 0)


def select_scatter(host: Host, x: Tensor, src: Tensor, dim: int, index: Any) -> Any:
    """Computes `torch.select_scatter` at a tensor's number; NotImplemented for other indices."""
    if not isinstance(index, Tensor):
        return NotImplemented
    host.needs_ranks()
    return x.index_copy(dim, index.reshape(1), src.unsqueeze(dim))


def slice_scatter(
    host: Host,
    x: Tensor,
    src: Tensor,
    dim: int = 0,
    start: Any = None,
    end: Any = None,
    step: int = 1,
) -> Any:
    """Computes `torch.slice_scatter` between tensors' numbers; NotImplemented for other bounds."""
    if not has_tensor_bounds(slice(start, end)) or step != 1:
        return NotImplemented
    out = x.clone()
    _write_between(host, out, dim, slice(start, end), src)
    return out


def write_range(host: Host, x: Tensor, parts: Sequence[Any], value: Any) -> Any:
    """Does `x[parts] = value`, where one part is a slice whose bounds are tensors."""
    places = [place for place, part in enumerate(parts) if has_tensor_bounds(part)]
    place, others = places[0], [*parts]
    others[place] = _WHOLE
    if len(places) > 1 or parts[place].step not in (None, 1) or any(map(_is_other, others)):
        host.numbers.branches.refuse(
            "a write between bounds that are tensors is known to the checker beside integers and "
            "slices only.",
            "use index_copy, or torch.where with a mask.",
        )
    target = x[tuple(others)]
    after = any(part is Ellipsis for part in others[:place])
    dim = target.ndim - _count_dims(others[place:]) if after else _count_dims(others[:place])
    _write_between(host, target, dim, parts[place], value)
    return None


def _is_other(part: Any) -> bool:
    return part is not None and part is not Ellipsis and type(part) not in (int, slice)


def _count_dims(parts: Sequence[Any]) -> int:
    """Counts the result's dims that these parts give; none is a tensor or an ellipsis."""
    return len([part for part in parts if part is None or isinstance(part, slice)])


def _write_between(host: Host, target: Tensor, dim: int, bounds: slice, value: Any) -> None:
    """Writes along a dim: entry by entry, or one value everywhere, since the size is not known."""
    host.needs_ranks()
    dim %= target.ndim
    row = torch.as_tensor(value, dtype=target.dtype, device=target.device)
    at = dim - (target.ndim - row.ndim)
    length = row.shape[at] if at >= 0 else 1
    if length == 1:
        target.copy_(torch.where(_mask(target, dim, bounds), row, target))
        return
    index = _positions(0 if bounds.start is None else bounds.start, length, target)
    if isinstance(bounds.stop, Tensor):
        index = index + 0 * bounds.stop  # what is written depends on it
    torch.ops.aten.index_put_.default(target, [None] * dim + [index], row)


def _positions(start: Any, length: int, like: Tensor) -> Tensor:
    positions: Tensor = start + torch.arange(length, device=like.device)
    return positions


def _mask(target: Tensor, dim: int, bounds: slice) -> Tensor:
    """Marks the positions between the bounds, along a dim."""
    positions = torch.arange(target.shape[dim], device=target.device)
    limits = [] if bounds.start is None else [positions >= bounds.start]
    limits += [] if bounds.stop is None else [positions < bounds.stop]
    inside = limits[0] if len(limits) == 1 else limits[0] & limits[1]
    mask: Tensor = inside.reshape(-1, *(1,) * (target.ndim - 1 - dim))
    return mask

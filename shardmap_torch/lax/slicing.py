"""Slices at positions that tensors give, by JAX's names.

Slices are of a tensor, `operand`; a start or index is an integer, or a tensor of one, which may
vary between ranks; of several there is one a dim. A negative start counts from the end, unless
`allow_negative_indices` (of several, one a dim) is False; then it is clamped so that the slice lies
in the operand. Shape: the sizes asked for, or the operand's; types
are those of indexing; nothing is sent.
Backward: the cotangent at its place among zeros, or of a write, zero where it was overwritten and
the slice of the cotangent for `update`. All raise `CollectiveError`: for a position that is no
integer, a slice or an update that is larger than the operand, an update of another dtype.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.errors import CollectiveError, show, show_shape
from shardmap_torch.ops.arguments import read_dim, read_items, read_tensor

Index = int | Tensor
"""A position: a Python integer or a tensor of one."""

Wraps = bool | Sequence[bool]
"""Bool that says if negative starts count from the end; or one a dim."""


def dynamic_slice_in_dim(
    operand: Tensor,
    start_index: Index,
    slice_size: int,
    axis: int = 0,
    *,
    allow_negative_indices: bool = True,
) -> Tensor:
    """Returns `slice_size` entries of dim `axis` from `start_index` on; see `lax.slicing`.

    Example:
        >>> dynamic_slice_in_dim(torch.arange(5.0), torch.tensor(4), 2)
        tensor([3., 4.])
    """
    read_tensor("dynamic_slice_in_dim", operand)
    at = read_dim("dynamic_slice_in_dim", "axis", axis, operand.ndim)
    wraps = allow_negative_indices
    return operand.index_select(at, _positions(operand, start_index, slice_size, at, wraps))


def dynamic_slice(
    operand: Tensor,
    start_indices: Sequence[Index] | Tensor,
    slice_sizes: Sequence[int],
    *,
    allow_negative_indices: Wraps = True,
) -> Tensor:
    """Returns a box: one of `start_indices` and `slice_sizes` a dim; see `lax.slicing`.

    Example:
        >>> dynamic_slice(torch.arange(12.0).reshape(3, 4), (torch.tensor(1), 0), (2, 2))
        tensor([[4., 5.],
                [8., 9.]])
    """
    read_tensor("dynamic_slice", operand)
    starts = _read_each("dynamic_slice", "start_indices", start_indices, operand.ndim)
    sizes = _read_each("dynamic_slice", "slice_sizes", slice_sizes, operand.ndim)
    wraps = _read_wraps("dynamic_slice", allow_negative_indices, operand.ndim)
    for dim, (start, size) in enumerate(zip(starts, sizes, strict=True)):
        if size != operand.shape[dim]:
            operand = dynamic_slice_in_dim(
                operand, start, size, dim, allow_negative_indices=wraps[dim]
            )
    return operand


def dynamic_index_in_dim(
    operand: Tensor,
    index: Index,
    axis: int = 0,
    keepdims: bool = True,
    *,
    allow_negative_indices: bool = True,
) -> Tensor:
    """Returns the entry of dim `axis` at `index`, without it if not `keepdims`; see `lax.slicing`.

    Example:
        >>> dynamic_index_in_dim(torch.arange(5.0), -1, keepdims=False)
        tensor(4.)
    """
    entry = dynamic_slice_in_dim(
        operand, index, 1, axis, allow_negative_indices=allow_negative_indices
    )
    return entry if keepdims else entry.squeeze(axis)


def dynamic_update_slice_in_dim(
    operand: Tensor,
    update: Tensor,
    start_index: Index,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Tensor:
    """Returns a copy of `operand` with `update` written along dim `axis` from `start_index` on.

    Along other dims the update may be smaller, and is written from 0 on. See `lax.slicing`.

    Example:
        >>> dynamic_update_slice_in_dim(torch.zeros(4), torch.ones(2), torch.tensor(1), 0)
        tensor([0., 1., 1., 0.])
    """
    name = "dynamic_update_slice_in_dim"
    _read_update(name, operand, update)
    at = read_dim(name, "axis", axis, operand.ndim)
    positions = _positions(operand, start_index, update.shape[at], at, allow_negative_indices)
    across = [-1 if dim == at else 1 for dim in range(operand.ndim)]
    return operand.scatter(at, positions.reshape(across).expand(update.shape), update)


def dynamic_update_slice(
    operand: Tensor,
    update: Tensor,
    start_indices: Sequence[Index] | Tensor,
    *,
    allow_negative_indices: Wraps = True,
) -> Tensor:
    """Returns a copy of `operand` with `update` written at `start_indices`; see `lax.slicing`.

    Example:
        >>> dynamic_update_slice(torch.zeros(2, 3), torch.ones(1, 2), (torch.tensor(1), 0))
        tensor([[0., 0., 0.],
                [1., 1., 0.]])
    """
    name = "dynamic_update_slice"
    _read_update(name, operand, update)
    starts = _read_each(name, "start_indices", start_indices, operand.ndim)
    wraps = _read_wraps(name, allow_negative_indices, operand.ndim)
    smaller = [
        (dim, starts[dim], wraps[dim])
        for dim in range(operand.ndim)
        if update.shape[dim] != operand.shape[dim]
    ]
    return _updated(operand, update, smaller)


def _updated(operand: Tensor, update: Tensor, along: list[tuple[int, Index, bool]]) -> Tensor:
    """Writes along the first of the dims its slice with the others written."""
    if not along:
        return update.clone()
    (dim, start, wraps), rest = along[0], along[1:]
    if rest:
        own = dynamic_slice_in_dim(
            operand, start, update.shape[dim], dim, allow_negative_indices=wraps
        )
        update = _updated(own, update, rest)
    return dynamic_update_slice_in_dim(operand, update, start, dim, allow_negative_indices=wraps)


def dynamic_update_index_in_dim(
    operand: Tensor,
    update: Tensor,
    index: Index,
    axis: int,
    *,
    allow_negative_indices: bool = True,
) -> Tensor:
    """Returns a copy of `operand` with `update` written at `index` of dim `axis`.

    `update` has size 1 along `axis`, or lacks that dim. See `lax.slicing`.

    Example:
        >>> dynamic_update_index_in_dim(torch.zeros(3), torch.tensor(1.0), 2, 0)
        tensor([0., 0., 1.])
    """
    for value in (operand, update):
        read_tensor("dynamic_update_index_in_dim", value)
    at = read_dim("dynamic_update_index_in_dim", "axis", axis, operand.ndim)
    whole = update.unsqueeze(at) if update.ndim == operand.ndim - 1 else update
    return dynamic_update_slice_in_dim(
        operand, whole, index, at, allow_negative_indices=allow_negative_indices
    )


def _positions(operand: Tensor, start: Index, size: int, dim: int, wraps: bool) -> Tensor:
    """Returns the positions of a slice, clamped to the operand."""
    length = operand.shape[dim]
    if not isinstance(size, int) or not 0 <= size <= length:
        raise CollectiveError(f"a slice of {size} entries does not lie in a dim of {length}.")
    steps = torch.arange(size, device=operand.device)
    if isinstance(start, Tensor):
        if start.numel() != 1 or start.dtype.is_floating_point or start.dtype.is_complex:
            raise CollectiveError(
                f"a slice starts at one integer, not at {show_shape(start.dtype, start.shape)}."
            )
        first = start.reshape(())
        first = torch.where(first < 0, first + length, first) if wraps else first
        return first.clamp(0, length - size) + steps
    if not isinstance(start, int):
        raise CollectiveError(f"a slice starts at one integer, not at {show(start)}.")
    return min(max(start + length if wraps and start < 0 else start, 0), length - size) + steps


def _read_wraps(name: str, given: Wraps, num_dims: int) -> tuple[bool, ...]:
    """Reads whether negative starts count from the end, for each dim."""
    if isinstance(given, bool):
        return (given,) * num_dims
    return _read_each(name, "allow_negative_indices", given, num_dims)


def _read_update(name: str, operand: Tensor, update: Tensor) -> None:
    """Raises an error for an update that does not lie in the operand."""
    for value in (operand, update):
        read_tensor(name, value)
    sizes = zip(update.shape, operand.shape, strict=False)
    if update.ndim != operand.ndim or any(new > old for new, old in sizes):
        raise CollectiveError(
            f"{name}: an update of shape {list(update.shape)} does not lie in an operand of shape "
            f"{list(operand.shape)}."
        )
    if update.dtype != operand.dtype:
        raise CollectiveError(
            f"{name}: an update of {update.dtype} is not of the operand's dtype, "
            f"{operand.dtype}; convert it."
        )


def _read_each(name: str, word: str, values: Iterable[Any], num_dims: int) -> tuple[Any, ...]:
    """Reads one value for each dim."""
    items = read_items(name, word, values)
    if len(items) != num_dims:
        raise CollectiveError(
            f"{name}: {word} has {len(items)} entries for an operand of {num_dims} dims."
        )
    return items

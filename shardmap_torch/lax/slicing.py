"""Slices at positions that tensors give, by JAX's names."""

import torch
from torch import Tensor

from shardmap_torch.errors import CollectiveError, show, show_shape
from shardmap_torch.ops.arguments import read_dim, read_tensor

Index = int | Tensor
"""A position: a Python integer or a tensor of one."""


def dynamic_slice_in_dim(
    operand: Tensor, start_index: Index, slice_size: int, axis: int = 0
) -> Tensor:
    """Returns `slice_size` entries of dim `axis` from `start_index` on.

    A negative start counts from the end; then it is clamped so that the slice lies in the operand.
    Shape: `axis` becomes `slice_size`. Types: of `operand` and `start_index`, as in indexing.
    Sends nothing. Backward: the cotangent at its place among zeros.

    Args:
        operand: any tensor of at least one dim.
        start_index: an integer, or a tensor of one, which may vary between ranks.
        slice_size: number of entries; at most the size of the dim.
        axis: the dim.

    Raises:
        CollectiveError: no such dim, or the slice is larger than it.

    Source: `jax.lax.dynamic_slice_in_dim`.

    Example:
        >>> dynamic_slice_in_dim(torch.arange(5.0), torch.tensor(4), 2)
        tensor([3., 4.])
    """
    read_tensor("dynamic_slice_in_dim", operand)
    at = read_dim("dynamic_slice_in_dim", "axis", axis, operand.ndim)
    return operand.index_select(at, _positions(operand, start_index, slice_size, at))


def dynamic_index_in_dim(
    operand: Tensor, index: Index, axis: int = 0, keepdims: bool = True
) -> Tensor:
    """Returns the entry of dim `axis` at `index`; see `dynamic_slice_in_dim`.

    Shape: `axis` becomes 1, or goes away with `keepdims=False`. Types, backward and bytes: as
    `dynamic_slice_in_dim`.

    Args:
        operand: any tensor of at least one dim.
        index: an integer, or a tensor of one.
        axis: the dim.
        keepdims: whether the dim stays.

    Raises:
        CollectiveError: no such dim.

    Source: `jax.lax.dynamic_index_in_dim`.

    Example:
        >>> dynamic_index_in_dim(torch.arange(5.0), -1, keepdims=False)
        tensor(4.)
    """
    entry = dynamic_slice_in_dim(operand, index, 1, axis)
    return entry if keepdims else entry.squeeze(axis)


def dynamic_update_slice_in_dim(
    operand: Tensor, update: Tensor, start_index: Index, axis: int
) -> Tensor:
    """Returns a copy of `operand` with `update` written along dim `axis` from `start_index` on.

    The start is read as by `dynamic_slice_in_dim`. Along other dims the update may be smaller, and
    is written from 0 on. Shape: that of `operand`. Types: as of a write by an index. Sends nothing.
    Backward: zero where it was overwritten; the slice of the cotangent for `update`.

    Args:
        operand: any tensor of at least one dim.
        update: what is written, of the same dtype and number of dims.
        start_index: an integer, or a tensor of one, which may vary between ranks.
        axis: the dim.

    Raises:
        CollectiveError: no such dim, or the update does not fit in the operand.

    Source: `jax.lax.dynamic_update_slice_in_dim`.

    Example:
        >>> dynamic_update_slice_in_dim(torch.zeros(4), torch.ones(2), torch.tensor(1), 0)
        tensor([0., 1., 1., 0.])
    """
    name = "dynamic_update_slice_in_dim"
    for value in (operand, update):
        read_tensor(name, value)
    at = read_dim(name, "axis", axis, operand.ndim)
    sizes = list(zip(update.shape, operand.shape, strict=False))
    if update.ndim != operand.ndim or any(new > old for new, old in sizes):
        raise CollectiveError(
            f"{name}: an update of shape {list(update.shape)} does not lie in an operand of shape "
            f"{list(operand.shape)}."
        )
    positions = _positions(operand, start_index, update.shape[at], at)
    across = [-1 if dim == at else 1 for dim in range(operand.ndim)]
    return operand.scatter(at, positions.reshape(across).expand(update.shape), update)


def dynamic_update_index_in_dim(operand: Tensor, update: Tensor, index: Index, axis: int) -> Tensor:
    """Returns a copy of `operand` with `update` written at `index` of dim `axis`.

    Shape: that of `operand`; `update` has size 1 along `axis`, or lacks that dim. Types, backward
    and bytes: as `dynamic_update_slice_in_dim`.

    Args:
        operand: any tensor of at least one dim.
        update: what is written, of the same dtype.
        index: an integer, or a tensor of one.
        axis: the dim.

    Raises:
        CollectiveError: as `dynamic_update_slice_in_dim`.

    Source: `jax.lax.dynamic_update_index_in_dim`.

    Example:
        >>> dynamic_update_index_in_dim(torch.zeros(3), torch.tensor(1.0), 2, 0)
        tensor([0., 0., 1.])
    """
    for value in (operand, update):
        read_tensor("dynamic_update_index_in_dim", value)
    at = read_dim("dynamic_update_index_in_dim", "axis", axis, operand.ndim)
    whole = update.unsqueeze(at) if update.ndim == operand.ndim - 1 else update
    return dynamic_update_slice_in_dim(operand, whole, index, at)


def _positions(operand: Tensor, start: Index, size: int, dim: int) -> Tensor:
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
        return torch.where(first < 0, first + length, first).clamp(0, length - size) + steps
    if not isinstance(start, int):
        raise CollectiveError(f"a slice starts at one integer, not at {show(start)}.")
    return min(max(start + length if start < 0 else start, 0), length - size) + steps

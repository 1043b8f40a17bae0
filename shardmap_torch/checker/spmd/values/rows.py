"""Rows of one tensor that the entries of others belong to, followed through operations.

Each dim of the tensor is an axis of its own here, over which the dims of others are sharded: then a
value whose layout is known depends, in each entry, on one row only. The layouts are those on one
device, so that collectives are of no account.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, Final

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.aten_rules import propagate
from shardmap_torch.checker.spmd.sharded import Step
from shardmap_torch.core.torch_private.engine import OpOverload

COPIES: Final = (
    "view _unsafe_view reshape _reshape_alias unsqueeze squeeze squeeze.dim squeeze.dims permute t"
    " transpose.int expand clone alias detach _to_copy slice.Tensor select.int"
).split()
"""Names of operations whose results have entries of their operand, unchanged."""


def rows_of(shape: Shape) -> ShardedTensor:
    """Returns the layout of a tensor by its own entries."""
    dims = tuple(
        unsharded(size) if size == 1 else ((f"row {dim}", size),) for dim, size in enumerate(shape)
    )
    return ShardedTensor(dims, (1,) * len(shape), shape)


def without_rows(shape: Shape) -> ShardedTensor:
    """Returns a layout that matches any rows."""
    return ShardedTensor(tuple(() if size == 1 else ANY for size in shape), shape, shape)


def by_rows(dims: tuple[Dim, ...], shape: Shape) -> ShardedTensor:
    """Returns a layout by rows; dims that are of none are unsharded."""
    dims = tuple(unsharded(n) if dim == ANY else dim for dim, n in zip(dims, shape, strict=True))
    local = tuple(prod(base for axis, base in dim if axis is None) for dim in dims)
    return ShardedTensor(dims, local, shape)


def followed(
    op: OpOverload, args: Mapping[str, Any], shape: Shape, like: ShardedTensor
) -> ShardedTensor | None:
    """Returns the layout of a result, by all rows of `like`; None if entries depend on several.

    Args:
        op: the overload.
        args: its arguments on one device by name, layouts in place of tensors.
        shape: the shape of the result.
        like: the layout of an operand.
    """
    sizes = {axis: base for dim in like.dims for axis, base in dim if axis is not None}
    try:
        (found,) = propagate(Step(op, args, {}, [], [(shape, shape)], sizes))
    except UnrelatedError:
        return None
    if found.partial or found.pending:
        return None
    rows = by_rows(found.dims, shape)
    return rows if sorted(rows.axes) == sorted(like.axes) else None

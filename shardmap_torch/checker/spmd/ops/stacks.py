"""Values of several ranks along a dim of their own, as `all_gather` with `tiled=False` gives them.

On one device that dim has one entry. Blocks of a sharded dim are all of it once they are joined,
and addends of a pending sum are the sum once they are added up; nothing else is done with them.
"""

from collections.abc import Mapping, Sequence
from math import prod

from shardmap_torch.checker.spmd.layout import (
    ADDENDS,
    ANY,
    BLOCK,
    BLOCKS,
    Dim,
    ShardedTensor,
    Sizes,
    UnrelatedError,
    axes_of,
    is_stacked,
    numbers_of_shards,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import STACKED
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.sharded import Sharded, Step

_ALONE = "it reduces a part of the dims that have values of several ranks"


def gathered(
    x: ShardedTensor,
    axes: Sequence[str],
    partial: frozenset[str],
    dim: int,
    sizes: Mapping[str, int],
) -> tuple[tuple[Dim, ...], frozenset[str]]:
    """Returns the dims and the pending sums after the ranks' values have been stacked at `dim`.

    Raises:
        UnrelatedError: they are neither addends nor blocks, or over several axes.
    """
    dims = [*x.dims]
    if not axes:
        dims.insert(dim, ())
        return tuple(dims), partial
    axis, *others = axes
    at = x.sharded_by(axis)
    if others or (axis not in partial and (at is None or dims[at][0][0] != axis)):
        over = ", ".join(map(repr, axes))
        raise UnrelatedError(
            f"it stacks values that are neither addends nor blocks of one dim over {over}",
            STACKED,
        )
    if axis in partial:
        dims.insert(dim, ((ADDENDS, sizes[axis]),))
        return tuple(dims), partial - {axis}
    assert at is not None
    dims[at] = ((BLOCK, sizes[axis]), *dims[at][1:])
    dims.insert(dim, ((BLOCKS, sizes[axis]),))
    return tuple(dims), partial


def side_by_side(x: ShardedTensor, axes: Sequence[str], dim: int) -> tuple[Dim, ...] | None:
    """Returns the dims after blocks of another dim have been put behind one another in `dim`.

    None where the axes shard that dim, or no other.

    Example:
        >>> from shardmap_torch.checker.spmd.layout import sharded_dim, unsharded
        >>> x = ShardedTensor((unsharded(3), sharded_dim(4, ["tp"], {"tp": 2})), (3, 2), (3, 4))
        >>> side_by_side(x, ("tp",), 0)
        ((('<', 2), (None, 3)), (('>', 2), (None, 2)))
    """
    at = x.sharded_by(axes[0])
    if len(axes) > 1 or at in (None, dim) or ANY in x.dims or x.dims[at or 0][0][0] != axes[0]:
        return None
    assert at is not None
    count, dims = x.dims[at][0][1], [*x.dims]
    dims[at], dims[dim] = ((BLOCK, count), *dims[at][1:]), ((BLOCKS, count), *dims[dim])
    return tuple(dims)


def own_block(
    x: ShardedTensor, axes: Sequence[str], dim: int, sizes: Mapping[str, int]
) -> tuple[Dim, ...]:
    """Returns the dims after each rank has kept one of the blocks that lie in `dim`.

    Raises:
        UnrelatedError: they are not one for each rank.
    """
    (axis, *others), dims = axes, [*x.dims]
    if others or dims[dim][:1] != ((BLOCKS, sizes[axis]),):
        raise UnrelatedError("it scatters values of several ranks along another dim", STACKED)
    at = next(n for n, digits in enumerate(dims) if digits[:1] == ((BLOCK, sizes[axis]),))
    dims[at], dims[dim] = ((axis, sizes[axis]), *dims[at][1:]), dims[dim][1:]
    return tuple(dims)


def copy(step: Step) -> list[Sharded]:
    """Propagates a copy."""
    (x,) = step.shards
    return [Sharded(x.dims)]


def add(step: Step) -> list[Sharded]:
    """Propagates a sum, which is pending where it goes over a sharded dim.

    That of equal entries is the part of the sum on one device that a rank has of them.
    """
    (x,) = step.shards
    over = _over(step, x)
    equal = [dim for dim in over if x.dims[dim] == ANY]
    copies = prod(_missing(x.local[dim], x.global_shape[dim], step.sizes) for dim in equal)
    inside = [axis for dim in over if dim not in equal for axis, _ in x.dims[dim]]
    if (BLOCK in inside) != (BLOCKS in inside):
        raise UnrelatedError(_ALONE, STACKED)
    kept: list[Dim | None] = [*x.dims]
    for dim in over:
        kept[dim] = () if step.arguments.get("keepdim") else None
    partial = frozenset(axis for dim in over for axis in axes_of(x.dims[dim]))
    return [Sharded(tuple(dim for dim in kept if dim is not None), partial, divided=copies)]


def _missing(local: int, global_size: int, sizes: Sizes) -> int:
    """Returns of how many shards that large a dim consists: what a symbol divides has no number."""
    for count in numbers_of_shards(sizes):
        if local * count == global_size:
            return count
    raise size_of_one_rank()


def average(step: Step) -> list[Sharded]:
    """Propagates a mean: of addends it is their sum, divided by their number."""
    (x,) = step.shards
    over = _over(step, x)
    if not is_stacked(x.dims):
        # torch 2.14 asks whether sizes are even, also of dims that nothing shards.
        whole = all(x.dims[dim] == unsharded(x.global_shape[dim]) for dim in over)
        return add(step) if whole else by_dtensor(step)
    if len(over) != 1 or x.dims[min(over)][0][0] != ADDENDS:
        raise UnrelatedError(_ALONE, STACKED)
    (made,) = add(step)
    return [Sharded(made.dims, divided=x.local[min(over)])]


def _over(step: Step, x: ShardedTensor) -> set[int]:
    """Returns the dims that are reduced."""
    rank = len(x.dims)
    return {dim % rank for dim in step.arguments.get("dim") or range(rank)} if rank else set()

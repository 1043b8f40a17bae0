"""Blocks of a dim behind one another in another dim, as a gather along dim 0 puts them.

They are all of the dim once they are joined; nothing else is done with them. Sums, which take the
blocks of a sharded dim for addends, are here as well.
"""

from collections.abc import Mapping, Sequence

from shardmap_torch.checker.spmd.layout import (
    ANY,
    BLOCK,
    BLOCKS,
    Dim,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import STACKED
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.sharded import Sharded, Step

_ALONE = "it reduces a part of the dims that have values of several ranks"


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
    """Propagates a sum, which is pending where it goes over a sharded dim."""
    (x,) = step.shards
    over = _over(step, x)
    if any(x.dims[dim] == ANY for dim in over):
        raise size_of_one_rank()
    inside = [axis for dim in over for axis, _ in x.dims[dim]]
    if (BLOCK in inside) != (BLOCKS in inside):
        raise UnrelatedError(_ALONE, STACKED)
    kept: list[Dim | None] = [*x.dims]
    for dim in over:
        kept[dim] = () if step.arguments.get("keepdim") else None
    partial = frozenset(axis for dim in over for axis in axes_of(x.dims[dim]))
    return [Sharded(tuple(dim for dim in kept if dim is not None), partial)]


def average(step: Step) -> list[Sharded]:
    """Propagates a mean: over dims that a rank has all of, without asking DTensor."""
    (x,) = step.shards
    # torch 2.14 asks whether sizes are even, also of dims that nothing shards.
    whole = all(x.dims[dim] == unsharded(x.global_shape[dim]) for dim in _over(step, x))
    return add(step) if whole else by_dtensor(step)


def _over(step: Step, x: ShardedTensor) -> set[int]:
    """Returns the dims that are reduced."""
    rank = len(x.dims)
    return {dim % rank for dim in step.arguments.get("dim") or range(rank)} if rank else set()

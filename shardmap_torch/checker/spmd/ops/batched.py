"""Sharding rules of operations on the last dims alone, and of copies side by side."""

from collections.abc import Sequence
from typing import Final

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    UnrelatedError,
    axes_of,
    fill,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import NUMBER
from shardmap_torch.checker.spmd.sharded import GATHER, Rule, Sharded, Step


def each(count: int) -> Rule:
    """Makes the rule of an operation on each matrix, or what else the last `count` dims hold."""

    def rule(step: Step) -> list[Sharded]:
        (x,) = step.shards
        at = len(x.dims) - count
        _require_unsharded(x.dims[at:], at)
        return [
            Sharded((*x.dims[:at], *map(unsharded, global_shape[at:])))
            for _, global_shape in step.results
        ]

    return rule


def _require_unsharded(dims: Sequence[Dim], first: int) -> None:
    for at, dim in enumerate(dims, first):
        if dim == ANY:
            raise size_of_one_rank()
        if axes_of(dim):
            raise UnrelatedError(f"it takes all of dim {at}, which is sharded", GATHER)


def repeat(step: Step) -> list[Sharded]:
    """Lays out copies side by side: of one entry they are equal entries, as `expand` makes them.

    Raises:
        UnrelatedError: it copies a sharded dim, or another number of times on one device.
    """
    (x,) = step.shards
    counts, ((local, global_shape),) = step.arguments["repeats"], step.results
    there = step.unsharded_arguments.get("repeats", counts)
    front = len(global_shape) - len(x.dims)
    dims = [*((),) * front, *x.dims]
    found = []
    for at, (mine, all_) in enumerate(zip(counts, there, strict=True)):
        if mine == all_ == 1:
            found.append(dims[at])
        elif dims[at] == ():
            found += fill(local[at : at + 1], global_shape[at : at + 1])
        elif mine != all_:
            raise UnrelatedError(
                f"it copies dim {at - front} {mine} times on a rank and {all_} times on one device",
                NUMBER,
            )
        else:
            _require_unsharded(dims[at : at + 1], at - front)
            found.append(unsharded(global_shape[at]))
    return [Sharded(tuple(found))]


def grid(step: Step) -> list[Sharded]:
    """Lays out the grids of affine maps, of which torch requires as many as the first size says.

    Raises:
        UnrelatedError: a grid has other sizes on one device.
    """
    size = step.arguments["size"]
    there = step.unsharded_arguments.get("size", size)
    if tuple(size[1:]) != tuple(there[1:]):
        raise UnrelatedError(
            f"its argument size is {size} on a rank and {list(there)} on one device", NUMBER
        )
    return each(2)(step)


LAST: Final = {
    1: "reflection_pad1d replication_pad1d",
    2: "tril tril_ triu triu_ reflection_pad2d replication_pad2d _linalg_eigh _linalg_svd linalg_qr"
    " col2im",
    3: "reflection_pad3d replication_pad3d",
}
"""Operations on each of the tensors that the last dims, as many as this, hold."""

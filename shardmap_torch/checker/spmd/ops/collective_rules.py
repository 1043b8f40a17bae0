"""Sharding rules of collectives: on one device each is the identity."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from types import MappingProxyType
from typing import Final, TypeAlias

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    ShardedTensor,
    Sizes,
    UnrelatedError,
    gathered,
    in_words,
    merged,
    sliced,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import STACKED, gather_advice
from shardmap_torch.collectives.operations import Collective

Axes: TypeAlias = tuple[str, ...]

_USE: Final = {"R": "leave it R, as all_gather(..., dst=R) and to='reduced' in lax do"}

State: TypeAlias = tuple[tuple[Dim, ...], frozenset[str]]
"""The shards of the dims, and the axes over which the value is a pending sum."""

_WRAP: Final = (
    "wrap code that is per-rank by nature in local_region(f, in_types, out_types), which "
    "validate_rule tries with numbers."
)


@dataclass(frozen=True)
class Move:
    """A collective in the ranks' program.

    Attributes:
        collective: the collective itself.
        axes: the ones of its axes that have more than one rank.
        x: its operand.
        partial: the axes over which the operand is a pending sum.
        sizes: the size of each axis.
        zero: whether the operand is known to be zeros, which are addends of any sum.
    """

    collective: Collective
    axes: Axes
    x: ShardedTensor
    partial: frozenset[str]
    sizes: Sizes
    zero: bool = False


def after(name: str, move: Move) -> State:
    """Returns the state of the result of a collective that moves data in the named way.

    Raises:
        UnrelatedError: the collective is not the identity on one device.
    """
    collective = move.collective
    if name == "ragged":  # rows beyond those that are sent become zeros, also on one rank
        raise UnrelatedError("its rows go to the ranks that data names", _WRAP)
    if not move.axes and (collective.tiled or name == "gather"):
        at, dims = collective.dim, move.x.dims
        return (dims if collective.tiled else (*dims[:at], (), *dims[at:])), move.partial
    if len(set(collective.sizes or ()) | set(collective.concat_sizes or ())) > 1:
        raise UnrelatedError("its sizes are uneven, and ranks hold padding", _WRAP)
    if not collective.tiled:
        raise UnrelatedError("it makes or takes a dim with one entry per rank", STACKED)
    if name not in _MOVES:
        raise UnrelatedError("ranks get the values of other ranks' shards", _WRAP)
    dims_after, sums_after = _MOVES[name]
    return dims_after(move), sums_after(move)


def _kept(move: Move) -> tuple[Dim, ...]:
    return move.x.dims


def _still(move: Move) -> frozenset[str]:
    return move.partial


def _added(move: Move) -> frozenset[str]:
    return move.partial | set(move.axes)


def _taken(move: Move) -> frozenset[str]:
    """Returns the axes of sums that are still pending after the sum over the collective's axes."""
    for axis in move.axes:
        if axis not in move.partial:
            dim = move.x.sharded_by(axis)
            if dim is None and move.zero:
                continue
            have = "equal on all ranks" if dim is None else f"sharded along dim {dim}"
            raise UnrelatedError(
                f"over {axis!r} its operand is not a pending sum but {have}",
                f"all_gather it over {axis!r}, or contract dim {dim} first."
                if dim is not None
                else "drop the collective.",
            )
    return move.partial - set(move.axes)


def _gathered(move: Move) -> tuple[Dim, ...]:
    return _joined(move, move.collective.dim)


def _sliced(move: Move) -> tuple[Dim, ...]:
    return _parted(move, move.collective.dim, move.x.dims)


def _exchanged(move: Move) -> tuple[Dim, ...]:
    dim, dims = move.collective.dim, move.x.dims
    if dim == move.collective.concat_dim:
        found = exchanged(dims[dim], move.axes, move.sizes)
        if found is None:
            over = ", ".join(map(repr, move.axes))
            raise UnrelatedError(
                f"it exchanges blocks of dim {dim} over {over}, and that dim is "
                f"{in_words(dims[dim])}",
                f"shard that dim, split along another, or {_WRAP}",
            )
        return (*dims[:dim], found, *dims[dim + 1 :])
    return _parted(move, dim, _joined(move, move.collective.concat_dim))


def _same(move: Move) -> tuple[Dim, ...]:
    collective = move.collective
    is_sum = collective.src.kind == "V" and set(move.axes) <= move.partial
    # As a gradient of each sample is, whose type alone does not tell it from an addend.
    is_shard = collective.src.kind == "P" and set(move.axes) <= {*move.x.axes} - move.partial
    if collective.name == "reinterpret" and not (is_sum or is_shard):
        raise UnrelatedError(
            "it keeps the bits and changes the meaning, so that the value is another one",
            f"{_USE.get(collective.src.kind, 'use convert')}, or {_WRAP}",
        )
    return move.x.dims


def _extremum(move: Move) -> tuple[Dim, ...]:
    """Types an extremum over ranks: it finishes one that each rank has taken over its shard."""
    if move.partial:
        over = ", ".join(map(repr, sorted(move.partial)))
        raise UnrelatedError(
            f"its operand is a pending sum over {over}, of which ranks have addends",
            f"all_reduce or reduce_scatter it over {over} first.",
        )
    if not set(move.axes).isdisjoint(move.x.axes):
        raise UnrelatedError(
            "it is a maximum or minimum over shards", f"take that of each shard first, or {_WRAP}"
        )
    return move.x.dims


def exchanged(dim: Dim, axes: Sequence[str], sizes: Sizes) -> Dim | None:
    """Returns a dim after block i of rank j has become block j of rank i, or None.

    The ranks' index and the first digits of the blocks that a rank has trade places.

    Example:
        >>> from shardmap_torch.checker.spmd.layout import sharded_dim
        >>> exchanged(sharded_dim(12, ["tp"], {"tp": 2}), ("tp",), {"tp": 2})
        ((None, 2), ('tp', 2), (None, 3))
        >>> exchanged(((None, 2), ("tp", 2), (None, 3)), ("tp",), {"tp": 2})
        (('tp', 2), (None, 6))
    """
    count, names = prod(sizes[axis] for axis in axes), [axis for axis, _ in dim]
    own = next((at for at, axis in enumerate(names) if axis is None), None)
    if dim == ANY or own is None or axes[0] not in names or dim[own][1] % count:
        return None
    at, index = names.index(axes[0]), tuple((axis, sizes[axis]) for axis in axes)
    rest, blocks = unsharded(dim[own][1] // count), ((None, count),)
    if dim[at : at + len(axes)] != index or (at > own and (rest or None in names[own + 1 : at])):
        return None  # what a rank then has would lie in another order
    parts = {at: blocks, own: (*index, *rest)}
    kept = [n for n in range(len(dim)) if not at < n < at + len(axes)]
    return tuple(merged([digit for n in kept for digit in parts.get(n, (dim[n],))]))


def _joined(move: Move, dim: int) -> tuple[Dim, ...]:
    """Returns the dims after one has been gathered over the axes."""
    x, split = move.x, move.collective.dim if move.collective.name == "all_to_all" else None
    there = x.global_shape[dim]
    if x.dims[dim] == ANY and x.local[dim] * prod(move.sizes[each] for each in move.axes) == there:
        return (*x.dims[:dim], unsharded(there), *x.dims[dim + 1 :])  # of equal entries
    found = gathered(x.dims[dim], move.axes)
    if found is None:
        over = ", ".join(map(repr, move.axes))
        raise UnrelatedError(
            f"it puts dim {dim} together over {over}, and that dim is {in_words(x.dims[dim])}",
            gather_advice(x, move.axes, dim, split),
        )
    return (*x.dims[:dim], found, *x.dims[dim + 1 :])


def _parted(move: Move, dim: int, dims: tuple[Dim, ...]) -> tuple[Dim, ...]:
    """Returns the dims after one has been sharded over the axes."""
    found = sliced(dims[dim], move.axes, move.sizes)
    if found is None:
        raise UnrelatedError(f"it shards dim {dim} across the blocks it consists of")
    return (*dims[:dim], found, *dims[dim + 1 :])


_MOVES: Final[
    Mapping[str, tuple[Callable[[Move], tuple[Dim, ...]], Callable[[Move], frozenset[str]]]]
] = MappingProxyType(
    {
        "sum": (_kept, _taken),
        "max": (_extremum, _still),
        "min": (_extremum, _still),
        "gather": (_gathered, _still),
        "slice": (_sliced, _still),
        "pad": (_gathered, _added),
        "sum_scatter": (_sliced, _taken),
        "exchange": (_exchanged, _still),
        "mask": (_kept, _added),
        "same": (_same, _still),
    }
)
"""Rules of movements of data: the shards of the dims after it, and the pending sums."""

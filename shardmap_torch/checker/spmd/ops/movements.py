"""Layouts over some axes after collectives over others, along which both programs have ranks."""

from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Final

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    in_words,
    merged,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.collectives.operations import Collective


def moved(move: str, collective: Collective, x: ShardedTensor, shape: Shape) -> Sequence[Dim]:
    """Returns the layout of the result, of that shape where the other axes have one rank.

    Raises:
        UnrelatedError: it moves what the other axes shard apart.
    """
    names = _ALONG.get(move)
    if names is None:
        raise UnrelatedError(
            "beside axes that the region does not name, nothing is known of what it moves",
            "name all axes in the types of the region.",
        )
    if move == "gather":
        return _gathered(collective, x, shape)
    dims = {getattr(collective, name) for name in names}
    return _along(collective, dims, x, shape) if dims else x.dims


def _gathered(collective: Collective, x: ShardedTensor, shape: Shape) -> Sequence[Dim]:
    """Lays out the shards of the ranks, one behind the other."""
    at = collective.dim
    _require_even(collective)
    if not collective.tiled:
        return [*x.dims[:at], unsharded(shape[at]), *x.dims[at:]]
    if x.dims[at] == ANY:
        raise size_of_one_rank("its size")
    count = shape[at] // max(x.global_shape[at], 1)
    return [*x.dims[:at], tuple(merged([(None, count), *x.dims[at]])), *x.dims[at + 1 :]]


def _along(
    collective: Collective, dims: Collection[int], x: ShardedTensor, shape: Shape
) -> Sequence[Dim]:
    """Requires that no other axis shards the dims along which a collective goes."""
    _require_even(collective)
    if not collective.tiled:
        raise UnrelatedError("it makes or takes a dim with one entry per rank", "use tiled=True.")
    for at in dims:
        if x.dims[at] == ANY or axes_of(x.dims[at]):
            raise UnrelatedError(f"it goes along dim {at}, which is {in_words(x.dims[at])}")
    return [unsharded(shape[at]) if at in dims else dim for at, dim in enumerate(x.dims)]


def _require_even(collective: Collective) -> None:
    if collective.sizes is not None or collective.concat_sizes is not None:
        raise UnrelatedError("its sizes may be uneven, and ranks hold padding")


_ALONG: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "exchange": ("dim", "concat_dim"),
        **dict.fromkeys(("gather", "sum_scatter", "slice", "pad"), ("dim",)),
        **dict.fromkeys(("sum", "max", "min", "permute", "broadcast"), ()),
        **dict.fromkeys(("mask", "sum_mask", "same"), ()),
    }
)
"""Dims along which collectives go; others are refused, as an exchange by numbers of rows."""

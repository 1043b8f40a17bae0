"""What each move does to the shape of a rank's value: all that an abstract mesh computes."""

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

from shardmap_torch.backends.reference import untiled_dims
from shardmap_torch.collectives.operations import Collective

Shape = tuple[int, ...]


def _same(c: Collective, shape: Shape, num_ranks: int) -> Shape:
    return shape


def _join(shape: Shape, dim: int, tiled: bool, sizes: tuple[int, ...] | None, n: int) -> Shape:
    if not tiled:
        return (*shape[:dim], n, *shape[dim:])
    length = sum(sizes) if sizes is not None else n * shape[dim]
    return (*shape[:dim], length, *shape[dim + 1 :])


def _cut(shape: Shape, dim: int, tiled: bool, sizes: tuple[int, ...] | None, n: int) -> Shape:
    if not tiled:
        return (*shape[:dim], *shape[dim + 1 :])
    length = max(sizes) if sizes is not None else shape[dim] // n
    return (*shape[:dim], length, *shape[dim + 1 :])


def _gather(c: Collective, shape: Shape, num_ranks: int) -> Shape:
    return _join(shape, c.dim, c.tiled, c.sizes, num_ranks)


def _slice(c: Collective, shape: Shape, num_ranks: int) -> Shape:
    return _cut(shape, c.dim, c.tiled, c.sizes, num_ranks)


def _exchange(c: Collective, shape: Shape, num_ranks: int) -> Shape:
    gather_dim, split_dim = untiled_dims(c) if not c.tiled else (c.concat_dim, c.dim)
    whole = _join(shape, gather_dim, c.tiled, c.concat_sizes, num_ranks)
    return _cut(whole, split_dim, c.tiled, c.sizes, num_ranks)


SHAPES: Final[Mapping[str, Callable[[Collective, Shape, int], Shape]]] = MappingProxyType(
    {
        "sum": _same,
        "max": _same,
        "min": _same,
        "gather": _gather,
        "slice": _slice,
        "pad": _gather,
        "sum_scatter": _slice,
        "exchange": _exchange,
        "permute": _same,
        "broadcast": _same,
        "mask": _same,
        "sum_mask": _same,
        "same": _same,
    }
)

"""Data movements: a record of each with its shape rule and the properties of its result.

Rows of the table name their movement; backends implement movements by name. A movement that some
part lacks fails `tests/collectives/test_moves.py`, which names the part.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, TypeAlias

Shape: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = tuple[int, ...] | None

ShapeRule: TypeAlias = Callable[[Any, Shape, int], Shape]
"""The shape of the result on a rank, from the collective, the operand's shape and the ranks."""


def untiled_dims(c: Any) -> tuple[int, int]:
    """Returns the dims, after the new dim is inserted, of the new one and of the split one."""
    if c.concat_dim <= c.dim:
        return c.concat_dim, c.dim + 1
    return c.concat_dim + 1, c.dim


def _same(c: Any, shape: Shape, num_ranks: int) -> Shape:
    return shape


def _concatenated(c: Any, shape: Shape, num_ranks: int) -> Shape:
    return _concatenate(shape, c.dim, c.tiled, c.sizes, num_ranks)


def _split(c: Any, shape: Shape, num_ranks: int) -> Shape:
    return _split_dim(shape, c.dim, c.tiled, c.sizes, num_ranks)


def _exchanged(c: Any, shape: Shape, num_ranks: int) -> Shape:
    concat_dim, split_dim = untiled_dims(c) if not c.tiled else (c.concat_dim, c.dim)
    joined = _concatenate(shape, concat_dim, c.tiled, c.concat_sizes, num_ranks)
    return _split_dim(joined, split_dim, c.tiled, c.sizes, num_ranks)


def _ragged(c: Any, shape: Shape, num_ranks: int) -> Shape:
    return (c.lengths[1], *shape[1:])


def _concatenate(shape: Shape, dim: int, tiled: bool, sizes: Sizes, num_ranks: int) -> Shape:
    if not tiled:
        return (*shape[:dim], num_ranks, *shape[dim:])
    length = sum(sizes) if sizes is not None else num_ranks * shape[dim]
    return (*shape[:dim], length, *shape[dim + 1 :])


def _split_dim(shape: Shape, dim: int, tiled: bool, sizes: Sizes, num_ranks: int) -> Shape:
    if not tiled:
        return (*shape[:dim], *shape[dim + 1 :])
    length = max(sizes) if sizes is not None else shape[dim] // num_ranks
    return (*shape[:dim], length, *shape[dim + 1 :])


@dataclass(frozen=True)
class Movement:
    """One movement of data between the ranks of some axes.

    Attributes:
        name: its name in rows and backends.
        shape: its shape rule.
        dims: fields of a collective that name the dims along which it moves.
        adds: whether it adds values of different ranks, so that the precision of sums matters.
        extremum: whether it takes a maximum or minimum over the ranks.
        equal: whether its result is equal on all ranks.
        views: whether a simulated result may be a view of its operand, which it only sends.
        local: whether it needs no communication.
        still: whether it returns its operand.
        shares: whether its result is a view of the operand, at least on some rank.
        copies: whether its result is a copy of the operand where there is one rank.
        numbered: whether it sends to ranks by their numbers, which one device has none of.
        ragged: whether it moves as many rows as data says.
    """

    name: str
    shape: ShapeRule = _same
    dims: tuple[str, ...] = ()
    adds: bool = False
    extremum: bool = False
    equal: bool = False
    views: bool = False
    local: bool = False
    still: bool = False
    shares: bool = False
    copies: bool = False
    numbered: bool = False
    ragged: bool = False

    @property
    def sums(self) -> bool:
        """Returns whether it is an all-reduce: entry by entry, so that tensors may go as one."""
        return self.adds and self.equal


_DIM: Final = ("dim",)

MOVEMENTS: Final[Mapping[str, Movement]] = MappingProxyType(
    {
        movement.name: movement
        for movement in (
            Movement("sum", adds=True, equal=True, copies=True),
            Movement("max", extremum=True, equal=True, copies=True),
            Movement("min", extremum=True, equal=True, copies=True),
            Movement("gather", _concatenated, _DIM, equal=True, views=True, copies=True),
            Movement("sum_scatter", _split, _DIM, adds=True, copies=True),
            Movement("exchange", _exchanged, ("dim", "concat_dim"), views=True, copies=True),
            Movement("ragged", _ragged, numbered=True, ragged=True),
            Movement("permute", numbered=True),
            Movement("broadcast", equal=True, views=True, numbered=True, copies=True),
            Movement("sum_mask", adds=True, copies=True),
            Movement("slice", _split, _DIM, local=True, shares=True),
            Movement("pad", _concatenated, _DIM, local=True),
            Movement("mask", local=True, shares=True),
            Movement("same", local=True, shares=True, still=True),
        )
    }
)
"""Every movement by its name."""

EXTREMA: Final = tuple(movement.name for movement in MOVEMENTS.values() if movement.extremum)

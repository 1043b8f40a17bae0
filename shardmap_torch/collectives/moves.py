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
class Move:
    """One movement of data between the ranks of some axes.

    Attributes:
        name: its name in rows and backends.
        shape: its shape rule.
        adds: whether it adds values of different ranks, so that the precision of sums matters.
        extremum: whether it takes a maximum or minimum over the ranks.
        equal: whether its result is equal on all ranks.
        sends: whether it only sends, so that a simulated result may be a view of its operand.
        local: whether it needs no communication.
    """

    name: str
    shape: ShapeRule = _same
    adds: bool = False
    extremum: bool = False
    equal: bool = False
    sends: bool = False
    local: bool = False


MOVES: Final[Mapping[str, Move]] = MappingProxyType(
    {
        move.name: move
        for move in (
            Move("sum", adds=True, equal=True),
            Move("max", extremum=True, equal=True),
            Move("min", extremum=True, equal=True),
            Move("gather", _concatenated, equal=True, sends=True),
            Move("sum_scatter", _split, adds=True),
            Move("exchange", _exchanged, sends=True),
            Move("ragged", _ragged),
            Move("permute"),
            Move("broadcast", equal=True, sends=True),
            Move("sum_mask", adds=True),
            Move("slice", _split, local=True),
            Move("pad", _concatenated, local=True),
            Move("mask", local=True),
            Move("same", local=True),
        )
    }
)
"""Every movement by its name."""

EXTREMA: Final = tuple(move.name for move in MOVES.values() if move.extremum)

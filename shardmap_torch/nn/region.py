"""`per_rank`: declares code of a layer as a `local_region`, with the types of other axes inferred.

A layer knows the axis that it communicates over and not the others: its batch may be sharded over
"dp", or over none. A `local_region` states the types over all axes. Here the types over axes that
the layer does not know are taken from its arguments, and mapped from dimension to dimension by
letters, as in `torch.einsum`: "...,vd->...d" is a lookup of rows.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

from torch import Tensor

from shardmap_torch.checker.queries import call_region
from shardmap_torch.checker.region import local_region
from shardmap_torch.nn.arguments import axes_of
from shardmap_torch.ops.arguments import Axis, finest
from shardmap_torch.spec import Entry, P

Types: TypeAlias = tuple[tuple[P, ...], P | tuple[P, ...]]
"""`in_types` and `out_types` of a `local_region`."""

_BATCH: Final = "..."


@dataclass(frozen=True)
class PerRank:
    """A function of tensors declared as per-rank code; calling it calls the function.

    With `check="global"` each call is a `local_region` whose types are those of the arguments.
    `typed` is that region for one choice of layouts, which `validate_rule` can try.

    Attributes:
        function: takes tensors.
        types: computes the region's types from the arguments' layouts and numbers of dimensions.
    """

    function: Callable[..., Any]
    types: Callable[[Sequence[P], Sequence[int]], Types]

    def __call__(self, *args: Tensor) -> Any:
        """Calls the function, under the checker as a region."""
        return call_region(self.function, self.types, *args)

    def typed(self, *layouts: P, ranks: Sequence[int]) -> Callable[..., Any]:
        """Declares the region for arguments of these layouts and numbers of dimensions."""
        return local_region(self.function, *self.types(layouts, ranks), trusted=True)


def per_rank(
    equation: str, *, over: Mapping[str, Axis], partial: Axis = ()
) -> Callable[[Callable[..., Any]], PerRank]:
    """Makes a decorator that declares a function of tensors as per-rank code.

    The function must treat the dimensions that `over` does not name position by position, so that
    any of them may be sharded over other axes.

    Args:
        equation: one term per argument and one per result, as in `torch.einsum`: a letter for a
            dimension, "..." for any number of leading ones. Nothing before "->": no arguments.
        over: the axis over which a letter's dimension is sharded.
        partial: axes over which the results are pending sums.

    Example:
        >>> rows = per_rank("...,vd->...d", over={"v": "tp"}, partial="tp")
        >>> rows(lambda ids, table: table[ids]).types([P("dp"), P()], [1, 2])
        ((P('dp'), P('tp', None)), P('dp', None, partial={'tp'}))
    """
    return lambda f: PerRank(
        f, lambda layouts, ranks: region_types(equation, over, partial, layouts, ranks)
    )


def region_types(
    equation: str,
    over: Mapping[str, Axis],
    partial: Axis,
    layouts: Sequence[P],
    ranks: Sequence[int],
) -> Types:
    """Derives `in_types` and `out_types` from the layouts of the arguments.

    Args:
        equation: as in `per_rank`.
        over: as in `per_rank`.
        partial: as in `per_rank`.
        layouts: of the arguments, over the axes that `over` does not name.
        ranks: numbers of dimensions of the arguments.

    Example:
        >>> region_types("...,vd->...d", {"v": "tp"}, "tp", [P("dp"), P()], [2, 2])
        ((P('dp', None), P('tp', None)), P('dp', None, None, partial={'tp'}))
    """
    left, right = equation.split("->")
    terms = left.split(",") if left else []
    over = {letter: finest(axes_of(axis)) for letter, axis in over.items()}
    partial = finest(axes_of(partial))
    own = {axis for axes in (*over.values(), partial) for axis in axes}
    entries: dict[str, Entry] = {letter: _entry(axes) for letter, axes in over.items()}
    spelled = [list(_letters(term, rank)) for term, rank in zip(terms, ranks, strict=True)]
    for term, layout in zip(spelled, layouts, strict=True):
        for letter, entry in zip(term, layout.entries, strict=False):
            if letter not in over and own.isdisjoint(axes_of(entry or ())):
                entries[letter] = entries.get(letter) or entry
    batch = sorted({letter for term in spelled for letter in term if len(letter) > 1})
    results = tuple(
        P(*map(entries.get, _letters(term, len(batch) + _num_named(term))), partial=partial)
        for term in right.split(",")
    )
    arguments = tuple(P(*map(entries.get, term)) for term in spelled)
    return arguments, results[0] if len(results) == 1 else results


def _num_named(term: str) -> int:
    return len(term.removeprefix(_BATCH))


def _letters(term: str, rank: int) -> Iterator[str]:
    """Names every dimension: leading ones by their position, counted from the front."""
    if term.startswith(_BATCH):
        yield from (f"batch {at}" for at in range(rank - _num_named(term)))
    yield from term.removeprefix(_BATCH)


def _entry(axis: Axis) -> Entry:
    axes = axes_of(axis)
    return axes[0] if len(axes) == 1 else axes

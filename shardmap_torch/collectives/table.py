"""Table of the collectives: types, data movement, transpose and bytes sent of each.

Each row has the types before and after along its axes, the data movement, and the key of its
transpose. Functions, documentation and tests are driven by this table; no other place defines a
backward.

Source of the pairs: the types of `jax.shard_map` with `check_vma` and of meta-pytorch/spmd_types.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from types import MappingProxyType
from typing import Any, Final

from shardmap_torch.errors import CollectiveError
from shardmap_torch.types import AxisType, I, Partial, R, V

Key = tuple[str, AxisType, AxisType]

TURNS: Final[Mapping[str, Callable[[Any], Mapping[str, Any]]]] = MappingProxyType(
    {
        "keep": lambda c: {},
        "swap dims": lambda c: {
            "dim": c.concat_dim,
            "concat_dim": c.dim,
            "sizes": c.concat_sizes,
            "concat_sizes": c.sizes,
        },
        "swap rows": lambda c: {
            "lengths": c.lengths[::-1],
            "counts": tuple(zip(*c.counts, strict=True)),
        },
        "invert pairs": lambda c: {"perm": tuple((dst, src) for src, dst in c.perm)},
    }
)
"""The arguments that change in a transpose, given those of the collective."""


@dataclass(frozen=True)
class CollectiveRow:
    """One line of the table.

    Attributes:
        name: the function as users call it; `reduce`, `mask` and reinterpret(V, V) only occur as
            transposes.
        src: type of the operand along the axes.
        dst: type of the result along the axes.
        move: name of the data movement.
        transpose: name and types of the row that carries cotangents back.
        turn: how the arguments change in the transpose, by its name in `TURNS`.
        sent: bytes that each of n ranks sends, in units of the operand's bytes, as a formula in n.
    """

    name: str
    src: AxisType
    dst: AxisType
    move: str
    transpose: Key
    sent: str = "0"
    turn: str = "keep"

    @property
    def key(self) -> Key:
        """Name and types: the row's key in the table."""
        return self.name, self.src, self.dst

    def sent_by(self, num_ranks: int) -> Fraction:
        """Evaluates `sent` for a number of ranks.

        Example:
            >>> TABLE["all_gather", V, R].sent_by(4)
            Fraction(3, 1)
        """
        return _FORMULAS[self.sent](Fraction(num_ranks))


_FORMULAS: Final[Mapping[str, Callable[[Fraction], Fraction]]] = MappingProxyType(
    {
        "0": lambda n: Fraction(0),
        "1": lambda n: Fraction(1),
        "n-1": lambda n: n - 1,
        "(n-1)/n": lambda n: (n - 1) / n,
        "2(n-1)/n": lambda n: 2 * (n - 1) / n,
    }
)

ROWS: Final = (
    CollectiveRow("all_reduce", Partial, R, "sum", ("all_reduce", Partial, R), "2(n-1)/n"),
    CollectiveRow("all_reduce", Partial, I, "sum", ("convert", I, R), "2(n-1)/n"),
    CollectiveRow("all_gather", V, R, "gather", ("reduce_scatter", Partial, V), "n-1"),
    CollectiveRow("all_gather", V, I, "gather", ("convert", I, V), "n-1"),
    CollectiveRow("reduce_scatter", Partial, V, "sum_scatter", ("all_gather", V, R), "(n-1)/n"),
    CollectiveRow("all_to_all", V, V, "exchange", ("all_to_all", V, V), "(n-1)/n", "swap dims"),
    CollectiveRow(
        "ragged_all_to_all", V, V, "ragged", ("ragged_all_to_all", V, V), "(n-1)/n", "swap rows"
    ),
    CollectiveRow("ppermute", V, V, "permute", ("ppermute", V, V), "1", "invert pairs"),
    CollectiveRow("broadcast", V, R, "broadcast", ("reduce", Partial, V), "1"),
    CollectiveRow("broadcast", V, I, "broadcast", ("mask", I, V), "1"),
    CollectiveRow("reduce", Partial, V, "sum_mask", ("broadcast", V, R), "2(n-1)/n"),
    CollectiveRow("mask", I, V, "mask", ("broadcast", V, I)),
    CollectiveRow("convert", I, R, "same", ("all_reduce", Partial, I)),
    CollectiveRow("convert", I, V, "slice", ("all_gather", V, I)),
    CollectiveRow("convert", I, Partial, "mask", ("convert", R, I)),
    CollectiveRow("convert", R, I, "same", ("convert", I, Partial)),
    CollectiveRow("convert", R, V, "slice", ("convert", V, Partial)),
    CollectiveRow("convert", V, Partial, "pad", ("convert", R, V)),
    CollectiveRow("convert", R, Partial, "mask", ("convert", R, Partial)),
    CollectiveRow("reinterpret", R, V, "same", ("reinterpret", V, Partial)),
    CollectiveRow("reinterpret", V, Partial, "same", ("reinterpret", R, V)),
    CollectiveRow("reinterpret", R, Partial, "same", ("reinterpret", R, Partial)),
    # Not a function of the pending sum: every addend has a cotangent of its own.
    CollectiveRow("reinterpret", Partial, V, "same", ("reinterpret", V, V)),
    CollectiveRow("reinterpret", V, V, "same", ("reinterpret", V, V)),
)

TABLE: Final[Mapping[Key, CollectiveRow]] = {row.key: row for row in ROWS}


def lookup(name: str, src: AxisType, dst: AxisType) -> CollectiveRow:
    """Returns the row of that name and types.

    Raises:
        CollectiveError: there is none; the message lists the rows of that name.
    """
    row = TABLE.get((name, src, dst))
    if row is None:
        known = ", ".join(f"{r.src} -> {r.dst}" for r in ROWS if r.name == name)
        raise CollectiveError(
            f"{name} does not go from {src} to {dst}; it goes {known}. "
            "redistribute(x, axis, src=, dst=) finds the collective for any two types."
        )
    return row

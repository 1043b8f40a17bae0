"""Words that the row tables are written with."""

from collections.abc import Mapping
from typing import Final

import torch
from torch._ops import OpOverload

from shardmap_torch.checker.rules.rule import Arguments, Row


def sums(*addends: str, unread: tuple[str, ...] = ()) -> Row:
    """Linear in all `addends` at once: a sum over ranks goes through if it stands in each.

    Example:
        >>> sums("self", "other").linear
        (('self',), ('other',))
    """
    return Row(linear=tuple((name,) for name in addends), unread=unread)


def product(*factors: str, unread: tuple[str, ...] = ()) -> Row:
    """Linear in each of `factors` while the others are fixed.

    Example:
        >>> product("self", "mat2").linear
        (('self', 'mat2'),)
    """
    return Row(linear=(factors,), unread=unread)


def each(row: Row, names: str) -> dict[OpOverload, Row]:
    """`row` for every overload in `names`, `packet.overload` in aten; one word means `.default`.

    Overloads that the installed torch does not have are left out: the table serves several
    versions, and a test holds it against the pinned one.

    Example:
        >>> list(each(SELF, "neg sum.dim_IntList"))
        [<OpOverload(op='aten.neg', overload='default')>, \
<OpOverload(op='aten.sum', overload='dim_IntList')>]
    """
    found = (_overload(name) for name in names.split())
    return {op: row for op in found if op is not None}


def _overload(name: str) -> OpOverload | None:
    packet, _, which = name.partition(".")
    overloads = getattr(torch.ops.aten, packet, None)
    found = getattr(overloads, which or "default", None)
    return found if isinstance(found, OpOverload) else None


def merged(*tables: Mapping[OpOverload, Row]) -> dict[OpOverload, Row]:
    """One table of several; an overload that stands in two is a mistake in the tables.

    Raises:
        ValueError: an overload stands in two tables.
    """
    table: dict[OpOverload, Row] = {}
    for rows in tables:
        twice = sorted(str(op) for op in rows.keys() & table.keys())
        if twice:
            raise ValueError(f"rows that stand twice: {', '.join(twice)}")
        table.update(rows)
    return table


def never(arguments: Arguments) -> bool:
    """Holds for no arguments."""
    return False


SELF: Final = sums("self")
GRAD: Final = sums("grad_output")
ZERO: Final = Row(zero=True)

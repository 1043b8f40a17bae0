"""Builders of rows, with which the rule tables are written."""

from collections.abc import Mapping
from typing import Final

import torch

from shardmap_torch.checker.rules.rule import Arguments, Row
from shardmap_torch.core.torch_private.engine import OpOverload


def sums(*addends: str, unread: tuple[str, ...] = ()) -> Row:
    """Makes the row of an operation that is linear in all `addends` together, as a sum is.

    Example:
        >>> sums("self", "other").linear
        (('self',), ('other',))
    """
    return Row(linear=tuple((name,) for name in addends), unread=unread)


def product(*factors: str, unread: tuple[str, ...] = ()) -> Row:
    """Makes the row of an operation that is linear in each of `factors`, as a product is.

    Example:
        >>> product("self", "mat2").linear
        (('self', 'mat2'),)
    """
    return Row(linear=(factors,), unread=unread)


def each(row: Row, names: str) -> dict[OpOverload, Row]:
    """Maps the overloads of these names to `row`."""
    return dict.fromkeys(overloads(names), row)


def overloads(names: str) -> list[OpOverload]:
    """Returns the overloads of names, each an aten `packet.overload`, or `.default` of it.

    Overloads that the installed torch does not have are left out: tables serve several versions,
    and a test compares those of rows with the pinned one.

    Example:
        >>> overloads("neg sum.dim_IntList")
        [<OpOverload(op='aten.neg', overload='default')>, \
<OpOverload(op='aten.sum', overload='dim_IntList')>]
    """
    return [op for op in map(_overload, names.split()) if op is not None]


def argument_of(name: str, *known: str) -> str:
    """Returns the one of the names `known` that an argument of an overload has in this torch.

    Releases rename arguments. It is the last of them if this torch has no such overload.

    Example:
        >>> argument_of("sum.dim_IntList", "input", "self")
        'self'
    """
    overload = _overload(name)
    arguments = () if overload is None else overload._schema.arguments
    names = {argument.name for argument in arguments}
    return next((own for own in known if own in names), known[-1])


def _overload(name: str) -> OpOverload | None:
    packet, _, which = name.partition(".")
    overloads = getattr(torch.ops.aten, packet, None)
    overload = getattr(overloads, which or "default", None)
    return overload if isinstance(overload, OpOverload) else None


def merged(*tables: Mapping[OpOverload, Row]) -> dict[OpOverload, Row]:
    """Merges tables into one.

    Raises:
        ValueError: an overload is in two tables.
    """
    table: dict[OpOverload, Row] = {}
    for rows in tables:
        twice = sorted(str(op) for op in rows.keys() & table.keys())
        if twice:
            raise ValueError(f"rows that stand twice: {', '.join(twice)}")
        table.update(rows)
    return table


def never(arguments: Arguments) -> bool:
    """Returns False for any arguments."""
    return False


SELF: Final = sums("self")
GRAD: Final = sums("grad_output")
ZERO: Final = Row(zero=True)

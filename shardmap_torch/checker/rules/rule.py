"""Typing rules of ATen overloads, as rows of data.

The tables are `operators.py` and `networks.py`; `registry.py` has them all. Rows speak of arguments
by the names in the overload's schema (`op._schema`). What needs no row:

* An ATen operation whose operands are not P. It is a deterministic function of what it reads, so
  equal operands give equal results; the join of rule 1 types it.
* Views. A result that shares its storage with an operand has the type of that storage.
* In-place and `out=` overloads. `add_.Tensor` and `add.out` have the row of `add.Tensor`; what
  is written comes from the schema, and an `out` argument is not read.
* Random draws (tag `nondeterministic_seeded`), which are V. Data-dependent shapes and values
  (their tags) of V or P are refused, and so are integer or bool results of floating P, even with a
  row.

What needs one: everything that is linear in a P; results that are zero; factories; operations that
do not read an operand's values; several results of different types; operations outside the `aten`
and `prims` namespaces, which are refused without a row.

A Python number is an argument too: 0 is Z, others are K. Tensors that no term names, a condition or
a divisor, select, scale or place: beside a P they must be R or K. Some rows:

    aten.cat.default: Row(linear=(("tensors",),)),  # every tensor of the list is an addend
    aten.mm.default: Row(linear=(("self", "mat2"),)),  # a product
    aten.addmm.default: Row(linear=(("self",), ("mat1", "mat2"))),  # self + mat1 @ mat2
    aten.div.Tensor_mode: Row(linear=(("self",),), when=lambda a: a["rounding_mode"] is None),
    aten.zeros_like.default: Row(zero=True, unread=("self",)),
    aten.convolution_backward.default: Row(  # each result has a row of its own
        results=(
            Row(linear=(("grad_output", "weight"),), unread=("input",)),
            Row(linear=(("grad_output", "input"),), unread=("weight",)),
            Row(linear=(("grad_output",),), unread=("input", "weight")),
        )
    ),
    aten._foreach_add.List: Row(linear=(("self",), ("other",)), zipped=True),
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch

from shardmap_torch.core.torch_private.engine import OpOverload

Arguments: TypeAlias = Mapping[str, Any]
"""The arguments of one call by the names of the schema, defaults filled in."""

Condition: TypeAlias = Callable[[Arguments], bool]


def always(arguments: Arguments) -> bool:
    """Returns True for any arguments."""
    return True


@dataclass(frozen=True)
class Row:
    """The typing rule of one overload; the default refuses Partial, and joins types that are read.

    Attributes:
        linear: a sum of products: one tuple of argument names per term. The operation is linear in
            each factor of a term while the others are fixed, and it is the sum of its terms. An
            argument is in several terms if it is, say, `x` in x*a + x*b. Arguments that are
            None, or absent lists, drop out: a product without a factor keeps the rest
            (`linear(x, w, None)`), a term without any factor is gone.
        when: returns whether `linear` applies to these arguments; if not, Partial is refused.
        unread: tensor arguments whose values do not matter, only shape and dtype.
        zero: the results are zeros, or memory not yet written.
        draws: returns whether values are drawn at random, if the overload's tags are wrong.
        results: one row per result, for results of different types; replaces `linear`, `unread`
            and `zero` of this row.
        zipped: lists of tensors are processed position by position, one result for each.
        refuse: why the operation is refused in a body whatever its operands are; None if it is not.
    """

    linear: tuple[tuple[str, ...], ...] = ()
    when: Condition = always
    unread: tuple[str, ...] = ()
    zero: bool = False
    draws: Condition | None = None
    results: tuple["Row", ...] = ()
    zipped: bool = False
    refuse: str | None = None


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


def backwards(names: str) -> str:
    """Returns the names of the backwards of operators."""
    return " ".join(f"{name}_backward" for name in names.split())


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

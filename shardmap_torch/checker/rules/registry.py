"""The table of all rows, the rows that users register, and the lookup of an overload's row."""

from collections.abc import Callable, Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final

import torch

from shardmap_torch.checker.rules.networks import ROWS as NETWORKS
from shardmap_torch.checker.rules.operators import OWN
from shardmap_torch.checker.rules.operators import ROWS as OPERATORS
from shardmap_torch.checker.rules.rule import Row, merged
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.errors import ShardTypeError, show

TABLE: Final[Mapping[OpOverload, Row]] = MappingProxyType(merged(OPERATORS, NETWORKS))
"""All rows of torch's operators; the families do not overlap."""

JOIN: Final = Row()
"""The row of a deterministic operation about which nothing more is known: P is refused."""


_REGISTERED: dict[OpOverload, Row] = {}

MEANINGS: Final[dict[OpOverload, Callable[..., Any]]] = {}
"""Functions interpreted in place of custom operators; see `register_decomposition`."""


def register_rule(op: OpOverload, row: Row) -> None:
    """Declares what a custom operator does to types.

    Args:
        op: one overload, as in `torch.ops.mylib.scale.default`.
        row: see `Row`. An operator that is a function of its tensors, the same on every rank, is
            `Row()`; name in `linear` the arguments in which it is linear, if they may be pending
            sums.

    The rule is trusted: check it numerically with `validate_rule`, in a test.

    Raises:
        ShardTypeError: the operator has a row already.

    Example:
        >>> import torch
        >>> from shardmap_torch import Row, register_rule
        >>> @torch.library.custom_op("readme_lib::halve", mutates_args=())
        ... def halve(x: torch.Tensor) -> torch.Tensor:
        ...     return x / 2
        >>> register_rule(torch.ops.readme_lib.halve.default, Row(linear=(("x",),)))
    """
    if not (isinstance(op, OpOverload) and isinstance(row, Row)):
        raise ShardTypeError(
            f"register_rule takes an operator's overload and a Row, not {show(op)} and {show(row)}."
        )
    if op in MEANINGS or row_of(op) is not None:
        raise ShardTypeError(f"register_rule: {op} has a rule already.")
    names = [argument.name for argument in op._schema.arguments]
    used = {name for term in row.linear for name in term} | set(row.unread)
    unknown = sorted(used - set(names))
    if unknown:
        raise ShardTypeError(
            f"register_rule: {op} has no argument {unknown[0]!r}; it has {', '.join(names)}."
        )
    _REGISTERED[op] = row
    row_of.cache_clear()


def table_version() -> int:
    """Returns a number that changes with every rule that is registered."""
    return len(_REGISTERED) + len(MEANINGS)


@lru_cache(maxsize=4096)
def row_of(op: OpOverload) -> Row | None:
    """Returns the row of `op`, or None if it has none.

    An in-place or `out=` overload without a row has the row of the functional one.
    """
    found = TABLE.get(op) or _REGISTERED.get(op) or OWN.get(str(op))
    if found is None and op._schema.is_mutable:
        found = next((TABLE[other] for other in functional(op) if other in TABLE), None)
    if found is None and op.namespace in ("aten", "prims"):
        return JOIN
    return found


def functional(op: OpOverload) -> list[OpOverload]:
    """Returns the functional overloads of which `op` is the in-place or `out=` variant."""
    names = [argument.name for argument in op._schema.arguments if not argument.is_out]
    packet = getattr(torch.ops.aten, op._schema.name.split("::")[1].removesuffix("_"), None)
    if op.namespace != "aten" or packet is None:
        return []
    overloads = [getattr(packet, overload) for overload in packet.overloads()]
    same = [
        other
        for other in overloads
        if not other._schema.is_mutable and [a.name for a in other._schema.arguments] == names
    ]
    # The overload of the same name first: `add_.Scalar` and `add_.Tensor` have the same arguments.
    return sorted(same, key=lambda other: other._overloadname != op._overloadname)

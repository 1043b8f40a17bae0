"""The table of all rows, what users register for operators of theirs, and the lookup of a row."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import lru_cache
from types import MappingProxyType
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.rules.networks import ROWS as NETWORKS
from shardmap_torch.checker.rules.operators import OWN
from shardmap_torch.checker.rules.operators import ROWS as OPERATORS
from shardmap_torch.checker.rules.rule import Row, merged
from shardmap_torch.core.storage import memory_of
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError, show, show_shape

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

    Source: `torch.distributed.tensor.experimental.register_sharding`, for types.

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


# ------------------------------------------------------------------------------ decompositions


Context: TypeAlias = AbstractContextManager[object]


def register_decomposition(op: OpOverload, f: Callable[..., Any]) -> None:
    """Defines a custom operator for the checker as a composition of operations that it knows.

    In place of the operator, in a forward or in a backward, the checker interprets `f`, from which
    all types come, including `Partial` and, under global strictness, `S(dim)`. It trusts that `f`
    computes what the operator computes: compare them with `validate_rule`, in a test. Shapes and
    dtypes are compared. Runs use the operator. A single row says less, and is quicker: see
    `register_rule`.

    Args:
        op: one overload, as in `torch.ops.mylib.rope.default`, that writes into no argument.
        f: takes the arguments of the operator, and returns its result.

    Raises:
        ShardTypeError: the operator has a rule already, or writes into an argument. When a body is
            checked: `f` returns another shape or dtype than the operator.

    Source: `spmd_types.register_decomposition`, which does so for a torch.autograd.Function.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, Partial, ShapeDtype, V, all_reduce, check_program
        >>> from shardmap_torch import I, make_mesh, reinterpret, shard_map
        >>> @torch.library.custom_op("readme_lib::swap", mutates_args=())
        ... def swap(x: torch.Tensor) -> torch.Tensor:
        ...     return torch.cat([-x[1:], x[:1]])
        >>> @swap.register_fake
        ... def _(x):
        ...     return torch.empty_like(x)
        >>> register_decomposition(
        ...     torch.ops.readme_lib.swap.default, lambda x: torch.cat([-x[1:], x[:1]])
        ... )
        >>> mesh = make_mesh((8,), ("tp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=P("tp"), out_specs=P())
        ... def body(x):
        ...     return all_reduce(swap(reinterpret(x, "tp", src=V, dst=Partial)), "tp", dst=I)
        >>> body(ShapeDtype((16,)))
        ShapeDtype(shape=(2,), dtype=torch.float32, requires_grad=False)
    """
    if op in MEANINGS or row_of(op) is not None:
        raise ShardTypeError(f"register_decomposition: {op} has a rule already.")
    if op._schema.is_mutable:
        raise ShardTypeError(
            f"register_decomposition: {op} writes into an argument, which a function that only "
            "gives a result cannot say. Write it without mutates_args, and copy in the body."
        )
    MEANINGS[op] = f


def interpreted(
    op: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any], context: Context
) -> Any:
    """Runs the decomposition of an operator under the mode `context`, which types its operations.

    Raises:
        ShardTypeError: the operator returns another shape or dtype.
    """
    with context:
        out = MEANINGS[op](*args, **kwargs)
        given, _ = flatten((args, dict(kwargs)))
        memory = {memory_of(x) for x in given if isinstance(x, Tensor)}
        out = _own(out, memory)
    actual, expected = _described(out), _described(op(*args, **kwargs))
    if actual != expected:
        raise ShardTypeError(f"{op} gives {expected}, and its decomposition {actual}.")
    return out


def _own(out: Any, memory: set[int | None]) -> Any:
    """Copies results that share memory, since those of an operator share none."""
    if isinstance(out, tuple | list):
        return type(out)([_own(item, memory) for item in out])
    if not isinstance(out, Tensor):
        return out
    own = out.clone() if memory_of(out) in memory else out
    memory.add(memory_of(own))
    return own


def _described(out: Any) -> str:
    if isinstance(out, tuple | list):
        return f"[{', '.join(map(_described, out))}]"
    if not isinstance(out, Tensor):
        return repr(out)
    return show_shape(out.dtype, out.shape)

"""The types of one ATen call's results, from its row and the types of what it reads."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import isfinite
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.rules.lattice import (
    BITS,
    BRANCH,
    INTEGER,
    UNKNOWN,
    WRAPPED,
    Outcome,
    Reason,
    Refusal,
    combine,
    join,
    multiply,
    plain,
)
from shardmap_torch.checker.rules.networks import HIDDEN_WRITES
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.checker.rules.rule import Row
from shardmap_torch.core.torch_private.engine import OpOverload, current_autograd_node
from shardmap_torch.types import AxisType, K, Partial, V, Z

Types: TypeAlias = tuple[AxisType, ...]
"""One type per mesh axis, in mesh order."""

Read: TypeAlias = Callable[[Tensor], Types]
"""A function that returns the types of an operand."""


Outcomes: TypeAlias = Types | Refusal


@dataclass(frozen=True)
class Signature:
    """Facts from the schema of an overload, looked up once.

    Attributes:
        names: the names of all arguments, in order.
        defaults: the default values of arguments that have one.
        outs: names of arguments that are written and not read.
        writes: names of arguments that are written, in order.
        random: whether it draws random numbers.
        branches: whether a Python value or a shape may depend on the data.
    """

    names: tuple[str, ...]
    defaults: Mapping[str, Any]
    outs: frozenset[str]
    writes: tuple[str, ...]
    random: bool
    branches: bool


@lru_cache(maxsize=4096)
def signature_of(op: OpOverload) -> Signature:
    """Returns the facts from the schema of an overload."""
    arguments = op._schema.arguments
    return Signature(
        tuple(a.name for a in arguments),
        {a.name: a.default_value for a in arguments if a.has_default_value()},
        frozenset(a.name for a in arguments if a.is_out),
        tuple(a.name for a in arguments if a.alias_info is not None and a.alias_info.is_write),
        torch.Tag.nondeterministic_seeded in op.tags,
        torch.Tag.data_dependent_output in op.tags or torch.Tag.dynamic_output_shape in op.tags,
    )


def writes_of(op: OpOverload, arguments: Mapping[str, Any]) -> tuple[str, ...]:
    """Returns the names of the arguments that a call writes, also those missing in its schema."""
    hidden = HIDDEN_WRITES.get(op, ()) if arguments.get("training") else ()
    return signature_of(op).writes + tuple(n for n in hidden if arguments.get(n) is not None)


def name_arguments(
    op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns the arguments of a call by the names of the schema, with defaults filled in."""
    signature = signature_of(op)
    return {**signature.defaults, **dict(zip(signature.names, args, strict=False)), **kwargs}


def named_tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Returns the tensors among named arguments, those in lists too, with the arguments' names."""
    found: list[tuple[str, Tensor]] = []
    for name, value in arguments.items():
        if isinstance(value, Tensor):
            found.append((name, value))
        elif isinstance(value, list | tuple):
            found += [(name, item) for item in value if isinstance(item, Tensor)]
    return found


def tensors_of(value: Any) -> Iterator[Tensor]:
    """Yields the tensors in one argument: itself, or those of a list, which may have Nones."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        yield from (item for item in value if isinstance(item, Tensor))


@lru_cache(maxsize=4096)
def may_draw(op: Any) -> bool:
    """Returns whether some call of this operator draws random numbers."""
    if not isinstance(op, OpOverload):
        return False
    row = row_of(op)
    if row is not None and any(each.draws is not None for each in (row, *row.results)):
        return True
    return signature_of(op).random


def draws(op: OpOverload, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a call draws random numbers."""
    row, signature = row_of(op), signature_of(op)
    rows = () if row is None else row.results or (row,)
    return any(_draws(each, signature, arguments) for each in rows)


def _draws(row: Row, signature: Signature, arguments: Mapping[str, Any]) -> bool:
    return signature.random if row.draws is None else row.draws(arguments)


def type_call(
    op: OpOverload,
    arguments: Mapping[str, Any],
    read: Read,
    num_axes: int,
    drawn: Types | None = None,
) -> list[Outcomes]:
    """Returns the types of each result, or one entry if all results have the same types.

    An in-place or `out=` call gets the types of what it computes; the effect of the write on the
    types of the memory is not computed here.

    Args:
        op: the overload.
        arguments: the arguments by name, with defaults filled in.
        read: returns the types of a tensor.
        num_axes: the number of axes.
        drawn: V along the axes over which the ranks draw different numbers, if the call draws;
            None where they draw different ones over all.
    """
    row = row_of(op)
    if row is None:
        return [Refusal(UNKNOWN)]
    if row.refuse is not None:
        return [Refusal(Reason(row.refuse))]
    if is_in_linear_backward():
        operands = [read(t) for value in arguments.values() for t in tensors_of(value)]
        return [each_axis(_join_linearly, operands, num_axes)]
    typing = _Typing(signature_of(op), read, num_axes, drawn)
    if row.zipped:
        return _each_position(row, typing, arguments)
    return [_outcome(each, typing, arguments) for each in row.results or (row,)]


@dataclass(frozen=True)
class _Typing:
    """Facts that decide the types of a call beside its row and arguments; see `type_call`."""

    signature: Signature
    read: Read
    num_axes: int
    drawn: Types | None


_LINEAR_NODES: Final = frozenset({"LinalgMatrixExpBackward0", "LogcumsumexpBackward0"})
"""Autograd nodes whose backward is linear in its cotangent although its operations are not.

`matrix_exp` takes the exponential of a block matrix that the cotangent is one block of, and
`logcumsumexp` the logarithm of the cotangent's absolute value.
"""


def is_in_linear_backward() -> bool:
    """Returns whether the backward of such a node is running."""
    node = current_autograd_node()
    return node is not None and node.name() in _LINEAR_NODES


def _join_linearly(types: Sequence[AxisType]) -> Outcome:
    # Several pending sums come from the one cotangent. The K, since what is not linear makes
    # something else of zeros.
    return multiply([K, *set(map(plain, types))])


def is_real(dtype: torch.dtype) -> bool:
    """Returns whether gradients exist for a dtype."""
    return dtype.is_floating_point or dtype.is_complex


_FEW_BITS: Final = (torch.uint8, torch.int8, torch.int16)


def rounding(
    op: OpOverload,
    arguments: Mapping[str, Any],
    results: Sequence[Tensor],
    types: Sequence[Types],
    read: Read,
) -> Refusal | None:
    """Returns the refusal of results in which addends of pending sums are rounded, or None.

    So are those of fractions in results of integers, and of all numbers in results of booleans; and
    those of integers of few bits, which have wrapped, in results of another dtype.
    """
    if not any(Partial in each for each in types):
        return None
    operands = [x for _, x in named_tensors(arguments)]
    any_real = any(is_real(x.dtype) for x in operands)
    wrapped = {x.dtype for x in operands if x.dtype in _FEW_BITS and Partial in read(x)}
    for index, made in enumerate(results):
        found, reason = types[index % len(types)], None
        if op is torch.ops.aten.view.dtype:
            reason = BITS
        elif made.dtype == torch.bool or (any_real and not is_real(made.dtype)):
            reason = INTEGER
        elif wrapped - {made.dtype}:
            reason = WRAPPED
        if Partial in found and reason is not None:
            return Refusal(reason, Partial, axis=found.index(Partial))
    return None


def type_results(
    op: OpOverload,
    arguments: Mapping[str, Any],
    results: Sequence[Tensor],
    read: Read,
    num_axes: int,
) -> list[Outcomes]:
    """Types a call as `type_call` does, and refuses results that round addends."""
    outcomes = type_call(op, arguments, read, num_axes)
    types = [each for each in outcomes if not isinstance(each, Refusal)]
    rounded = None
    if len(types) == len(outcomes):
        rounded = rounding(op, arguments, results, types, read)
    return outcomes if rounded is None else [rounded]


def each_axis(
    join_types: Callable[[Sequence[AxisType]], Outcome], operands: Sequence[Types], num_axes: int
) -> Outcomes:
    """Applies a rule of the lattice to the types of all operands, axis by axis."""
    found: list[AxisType] = []
    for axis in range(num_axes):
        outcome = join_types([types[axis] for types in operands])
        if isinstance(outcome, Refusal):
            return replace(outcome, axis=axis)
        found.append(outcome)
    return tuple(found)


def _at(arguments: Mapping[str, Any], index: int) -> dict[str, Any]:
    """Returns the arguments at one position of the lists."""
    return {
        name: value[index] if isinstance(value, list | tuple) and index < len(value) else value
        for name, value in arguments.items()
    }


def _each_position(row: Row, typing: _Typing, arguments: Mapping[str, Any]) -> list[Outcomes]:
    """Types lists of tensors position by position; of equal positions, as of layers, the first."""
    lists = [value for value in arguments.values() if isinstance(value, list | tuple)]
    counts = [len(value) for value in lists if any(isinstance(item, Tensor) for item in value)]
    known: dict[Any, Outcomes] = {}
    found = []
    for index in range(max(counts, default=0)):
        here = _at(arguments, index)
        key = tuple(
            [typing.read(x) if isinstance(x, Tensor) else (type(x), repr(x)) for x in here.values()]
        )
        if key not in known:
            known[key] = _outcome(row, typing, here)
        found.append(known[key])
    return found


def _outcome(row: Row, typing: _Typing, arguments: Mapping[str, Any]) -> Outcomes:
    signature, drawn = typing.signature, typing.drawn
    linear = row.linear if row.linear and row.when(arguments) else ()
    terms = [term for names in linear for term in _terms(names, typing, arguments)]
    used = {name for names in linear for name in names} | set(row.unread) | signature.outs
    others = [
        typing.read(tensor)
        for name, value in arguments.items()
        if name not in used
        for tensor in tensors_of(value)
    ]
    random = _draws(row, signature, arguments)
    types: list[AxisType] = []
    for axis in range(typing.num_axes):
        rest = [each[axis] for each in others]
        products = [[each[axis] for each in term] for term in terms]
        outcome = combine(products, rest) if linear else join(rest)
        if isinstance(outcome, Refusal):
            return replace(outcome, axis=axis)
        if outcome in (V, Partial) and branches(signature, arguments):
            return Refusal(BRANCH, outcome, axis=axis)
        # Draws with a pending sum as a parameter are no addends of a draw with the sum.
        if random and outcome == Partial:
            return Refusal(BITS, Partial, axis=axis)
        own = random and (drawn is None or drawn[axis] == V)
        types.append(V if own else Z if row.zero else outcome)
    return tuple(types)


def branches(signature: Signature, arguments: Mapping[str, Any]) -> bool:
    """Returns whether a Python value or a shape depends on the data of this call.

    Indexing has the tag because of masks; integer indices select as many items as there are.
    """
    indices = arguments.get("indices")
    if signature.branches and isinstance(indices, list | tuple):
        return any(t.dtype in (torch.bool, torch.uint8) for t in tensors_of(indices))
    return signature.branches


def _terms(
    names: Sequence[str], typing: _Typing, arguments: Mapping[str, Any]
) -> Iterator[list[Types]]:
    """Yields the products that one term of a row describes: a list makes one for each item."""
    values = [arguments[name] for name in names if arguments.get(name) is not None]
    if len(values) == 1 and isinstance(values[0], list | tuple):
        yield from ([_types(item, typing)] for item in values[0] if item is not None)
    elif values:
        # A finite number as a factor leaves zeros what they are.
        factors = [value for value in values if not is_factor(value)] or values
        yield [_types(value, typing) for value in factors]


def is_factor(value: Any) -> bool:
    """Returns whether a value is a finite number other than 0."""
    return type(value) in (int, float) and value != 0 and isfinite(value)


def _types(value: Any, typing: _Typing) -> Types:
    if isinstance(value, Tensor):
        return typing.read(value)
    zero = isinstance(value, int | float | complex) and value == 0
    return (Z if zero else K,) * typing.num_axes

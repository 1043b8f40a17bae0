"""One operation in the ranks' program and on one device, and how its results are sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.rules.infer import (
    Types,
    named_tensors,
    signature_of,
    tensors_of,
    type_results,
    writes_of,
)
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.checker.spmd.align import differing
from shardmap_torch.checker.spmd.layout import Dim, Shape, ShardedTensor, Sizes
from shardmap_torch.checker.spmd.recorder import Event
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.types import K, Partial, Z

WRAP: Final = "gather the operands first, or wrap per-rank code in local_region."
"""Advice where an operation cannot be done on shards."""

GATHER: Final = "gather it first, with all_gather."
"""Advice where a dim must be unsharded."""

GATHERED: Final = "gather it first, with all_gather; or "
PARTS: Final = (
    f"{GATHERED}make the parts a dim of their own: microbatches by "
    "x.view(micro, rows, ...), sharded as P(None, axis), and x.unbind(0)"
)
MICROBATCHES: Final = (
    f"{PARTS}; matrices packed in one weight by [d, h, parts], sharded as P(None, axis), and "
    "x.unbind(-1)."
)
"""Advice where a sharded dim is taken apart."""

POSITION: Final = (
    "one rank alone has that position. To write there, torch.where(at == i, value, x) with "
    f"at = torch.arange(n) + axis_index(axis) * n for a shard of n; to read, {PARTS}."
)
"""Advice where one entry of a sharded dim is meant."""


@dataclass(frozen=True)
class Sharded:
    """The sharding of a result, and the axes over which it is pending.

    Attributes:
        dims: how each dim is sharded.
        partial: axes over which the values are a pending sum.
        pending: axes over which a "max" or a "min" is pending.
        means: of `partial`, axes over which the mean is meant: the sum divided by their size.
        of_zeros: as in `ShardedTensor`.
        part: of the value on one device, as a sum of equal entries is of which a rank has fewer.
    """

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    pending: frozenset[tuple[str, str]] = frozenset()
    means: frozenset[str] = frozenset()
    of_zeros: bool = False
    part: Fraction = Fraction(1)


@dataclass(frozen=True, eq=False)
class PairedCall:
    """A call of an operation in the ranks' program, and the same one on one device.

    Attributes:
        op: the overload.
        arguments: its arguments in the ranks' program, by name.
        event: the call on one device.
        results: the tensors that it makes, or writes if it returns nothing.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    event: Event
    results: Sequence[Tensor]

    @lazy
    def tensors(self) -> list[Tensor]:
        """The tensors among the arguments."""
        return [tensor for _, tensor in named_tensors(self.arguments)]

    @lazy
    def written(self) -> list[Tensor]:
        """The tensors that it writes."""
        names = writes_of(self.op, self.arguments)
        return [tensor for name in names for tensor in tensors_of(self.arguments[name])]

    @lazy
    def read(self) -> list[Tensor]:
        """The tensors among the arguments whose values matter."""
        row = row_of(self.op)
        unread = set(row.unread) if row is not None and not row.results else set()
        unread |= signature_of(self.op).outs
        return [tensor for name, tensor in named_tensors(self.arguments) if name not in unread]

    def is_linear(
        self, is_addend: Callable[[Tensor], bool], is_zero: Callable[[Tensor], bool]
    ) -> bool:
        """Returns whether it is linear in these addends; zeros are addends of any sum."""

        def types_of(x: Tensor) -> Types:
            return (Partial,) if is_addend(x) else (Z,) if is_zero(x) else (K,)

        outcomes = type_results(self.op, self.arguments, self.results, types_of, 1)
        return all(outcome == (Partial,) for outcome in outcomes)

    @property
    def shapes(self) -> list[tuple[Shape, Shape]]:
        """The shapes of the results in both programs."""
        pairs = zip(self.results, self.event.results, strict=True)
        return [(tuple(tensor.shape), shape) for tensor, (_, shape) in pairs]

    @property
    def differing(self) -> dict[str, Any]:
        """The non-tensor arguments that differ on one device, with their values there."""
        plain = {n: x for n, x in self.arguments.items() if not any(True for _ in tensors_of(x))}
        return differing(plain, self.event)


@dataclass(frozen=True)
class Step:
    """One operation in both programs, tensors replaced by their layouts.

    Attributes:
        op: the overload.
        arguments: the arguments in the ranks' program by name.
        unsharded_arguments: the other arguments on one device, where they differ.
        tensors: the tensors that these layouts belong to, in order.
        results: shapes of each result in both programs.
        sizes: the size of each axis.
        function: the torch function that the body calls, if each run can look at its arguments.
        zeros: the arguments that are known to be zeros.
        drawn: axes that may shard a dim of draws together, likely ones first.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    unsharded_arguments: Mapping[str, Any]
    tensors: Sequence[Tensor]
    results: Sequence[tuple[Shape, Shape]]
    sizes: Sizes
    function: Any = None
    zeros: frozenset[str] = frozenset()
    drawn: Sequence[tuple[str, ...]] = ()

    @property
    def shards(self) -> list[ShardedTensor]:
        """Returns the layouts of all operands."""
        return list(shards_of(list(self.arguments.values())))

    def tensors_of(self, argument: str) -> list[Tensor]:
        """The tensors that stand behind one argument."""
        tensors = iter(self.tensors)
        for name, value in self.arguments.items():
            found = [next(tensors) for _ in shards_of(value)]
            if name == argument:
                return found
        return []


Rule: TypeAlias = Callable[[Step], list[Sharded]]


def shards_of(value: Any) -> list[ShardedTensor]:
    """Returns the layouts in an argument, or in a list of arguments."""
    if isinstance(value, ShardedTensor):
        return [value]
    if isinstance(value, list | tuple):
        found: list[ShardedTensor] = []
        for item in value:
            if isinstance(item, ShardedTensor):
                found.append(item)
            elif isinstance(item, list | tuple):
                found += shards_of(item)
        return found
    return []


_DIMS: Final = ("dim", "dims", "dim0", "dim1", "dim2", "dimension", "axis")
"""Names of arguments that are dims, or lists of dims."""

_aten = torch.ops.aten
_OF_RESULT: Final = (_aten.unsqueeze, _aten.unsqueeze_, _aten.stack, _aten.diag_embed)


def counted_from_front(
    op: OpOverload, arguments: Mapping[str, Any], results: Sequence[tuple[Shape, Shape]]
) -> Mapping[str, Any]:
    """Returns the arguments with -1 replaced by the last dim, and so on, for all rules.

    Some rules of DTensor take a negative dim for another than each of the sharded ones.
    """
    named = [name for name in _DIMS if name in arguments]
    if not named:
        return arguments
    is_of_result = op.overloadpacket in _OF_RESULT or "input_sizes" in arguments
    shapes = [x.local for x in shards_of([*arguments.values()])]
    ndim = len(results[0][0]) if is_of_result else max(map(len, shapes), default=0)
    ndim = max(ndim, 1)  # as torch counts those of a number

    def counted(dim: Any) -> Any:
        if isinstance(dim, list | tuple):
            return type(dim)(map(counted, dim))
        return dim + ndim if type(dim) is int and dim < 0 <= dim + ndim else dim

    return {**arguments, **{name: counted(arguments[name]) for name in named}}


def is_view(op: OpOverload) -> bool:
    """Returns whether the result shares its memory with an operand, and so its types."""
    shares = any(made.alias_info is not None for made in op._schema.returns)
    return shares and not op._schema.is_mutable and op is not torch.ops.aten.view.dtype

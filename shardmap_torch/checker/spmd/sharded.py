"""One operation in the ranks' program and on one device, and how its results are sharded."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.layout import Dim, Shape, ShardedTensor, Sizes
from shardmap_torch.core.torch_private.engine import OpOverload

WRAP: Final = "gather the operands first, or wrap per-rank code in local_region."
"""Advice where an operation cannot be done on shards."""

GATHER: Final = "gather it first, with all_gather."
"""Advice where a dim must be unsharded."""

NUMBER: Final = (
    "a number that depends on local shapes must be right on one device too: multiply sizes by "
    "axis_size(axis)."
)
"""Advice where an argument is another number on one device."""


@dataclass(frozen=True)
class Sharded:
    """The sharding of a result, and the axes over which it is pending.

    Attributes:
        dims: how each dim is sharded.
        partial: axes over which the values are a pending sum.
        pending: axes over which a "max" or a "min" is pending.
        means: of `partial`, axes over which the mean is meant: the sum divided by their size.
        divided: by how much more it is divided than on one device.
    """

    dims: tuple[Dim, ...]
    partial: frozenset[str] = frozenset()
    pending: frozenset[tuple[str, str]] = frozenset()
    means: frozenset[str] = frozenset()
    divided: int = 1


@dataclass(frozen=True)
class Step:
    """One operation in both programs.

    Attributes:
        op: the overload.
        arguments: the arguments in the ranks' program by name, tensors replaced by their layouts.
        unsharded_arguments: the other arguments on one device, where they differ.
        tensors: the tensors that these layouts belong to, in order.
        results: shapes of each result in both programs.
        sizes: the size of each axis.
        function: the torch function that the body calls, if each run can look at its arguments.
        zeros: the arguments that are known to be zeros.
    """

    op: OpOverload
    arguments: Mapping[str, Any]
    unsharded_arguments: Mapping[str, Any]
    tensors: Sequence[Tensor]
    results: Sequence[tuple[Shape, Shape]]
    sizes: Sizes
    function: Any = None
    zeros: frozenset[str] = frozenset()

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


def is_view(op: OpOverload) -> bool:
    """Returns whether the result shares its memory with an operand, and so its types."""
    shares = any(made.alias_info is not None for made in op._schema.returns)
    return shares and not op._schema.is_mutable and op is not torch.ops.aten.view.dtype

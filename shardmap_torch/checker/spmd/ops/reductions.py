"""Reductions of sharded dims: each rank has a sum, a mean or an extremum of its part."""

from collections.abc import Mapping
from fractions import Fraction
from math import prod
from typing import Final

import torch

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    ShardedTensor,
    axes_of,
    numbers_of_shards,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.sharded import Rule, Sharded, Step
from shardmap_torch.core.torch_private.engine import OpOverload

Pending = frozenset[tuple[str, str]]

aten = torch.ops.aten


def add(step: Step) -> list[Sharded]:
    """Propagates a sum, which is pending where it goes over a sharded dim."""
    (x,) = step.shards
    over = _over(step, x)
    repeated = [_times(step, x, dim) for dim in over if x.dims[dim] == ANY]
    partial = frozenset(axis for dim in over for axis in axes_of(x.dims[dim]))
    return [Sharded(_left(step, x, over), partial, part=Fraction(1, prod(repeated)))]


def _times(step: Step, x: ShardedTensor, dim: int) -> int:
    """Returns how many times as many equal entries one device has along a dim."""
    mine, all_ = x.local[dim], x.global_shape[dim]
    for count in numbers_of_shards(step.sizes):
        if mine * count == all_:
            return count
    raise size_of_one_rank()


def average(step: Step) -> list[Sharded]:
    """Propagates a mean: over dims that a rank has all of, without asking DTensor."""
    (x,) = step.shards
    # torch 2.14 asks whether sizes are even, also of dims that nothing shards.
    whole = all(x.dims[dim] == unsharded(x.global_shape[dim]) for dim in _over(step, x))
    return add(step) if whole else by_dtensor(step)


def _over(step: Step, x: ShardedTensor) -> set[int]:
    """Returns the dims that are reduced."""
    rank, given = len(x.dims), step.arguments.get("dim")
    listed = [given] if isinstance(given, int) else given or range(rank)
    return {*listed} if rank else set()


def _left(step: Step, x: ShardedTensor, over: set[int]) -> tuple[Dim, ...]:
    """Returns the dims of the result."""
    reduced: tuple[Dim, ...] = ((),) if step.arguments.get("keepdim") else ()
    kept = [reduced if at in over else (dim,) for at, dim in enumerate(x.dims)]
    return tuple(dim for each in kept for dim in each)


def extremum(kind: str) -> Rule:
    """Makes the rule of a reduction that is the `kind`, "max" or "min", of those of parts.

    Positions of extrema, the second result, are each rank's own.
    """

    def rule(step: Step) -> list[Sharded]:
        x: ShardedTensor = step.arguments["self"]
        over = _over(step, x)
        axes = frozenset(axis for dim in over for axis in axes_of(x.dims[dim]))
        is_unreduced = step.arguments.get("dim") == []
        if is_unreduced or not axes or any(x.dims[dim] == ANY for dim in over):
            return by_dtensor(step)
        dims = _left(step, x, over)
        values = Sharded(dims, pending=frozenset((axis, kind) for axis in axes))
        return [values, Sharded(dims)][: len(step.results)]

    return rule


_MONOTONE: Final[Mapping[OpOverload, Mapping[str, str]]] = {
    aten._to_copy.default: {"max": "max", "min": "min"},
    aten.bitwise_or.Tensor: {"max": "max"},
    aten.logical_or.default: {"max": "max"},
    aten.bitwise_and.Tensor: {"min": "min"},
    aten.logical_and.default: {"min": "min"},
    aten.bitwise_not.default: {"max": "min", "min": "max"},
    aten.logical_not.default: {"max": "min", "min": "max"},
}
"""The extremum pending of an operation on booleans, by the one that is pending of an operand."""

_BOUNDED: Final[Mapping[OpOverload, Mapping[str, str]]] = {
    **{op: {"max": "max", "min": "min"} for op in (aten.ge.Scalar, aten.gt.Scalar)},
    **{op: {"max": "min", "min": "max"} for op in (aten.le.Scalar, aten.lt.Scalar)},
}
"""That of a comparison of an integer: whether any rank's largest exceeds a bound, as all ranks'."""


def carried(op: OpOverload, dtype: torch.dtype, pending: Pending) -> Mapping[str, str]:
    """Returns the extrema that are pending after an operation, given those of an operand.

    Example:
        >>> carried(aten.logical_not.default, torch.bool, frozenset({("dp", "max")}))
        {'dp': 'min'}
        >>> carried(aten.neg.default, torch.int64, frozenset({("dp", "max")}))
        {}
        >>> carried(aten.lt.Scalar, torch.int64, frozenset({("dp", "max")}))
        {'dp': 'min'}
    """
    table = {} if dtype.is_floating_point else _MONOTONE if dtype == torch.bool else _BOUNDED
    through = table.get(op, {})  # a floating number may be none, which exceeds nothing
    return {axis: through[kind] for axis, kind in pending if kind in through}

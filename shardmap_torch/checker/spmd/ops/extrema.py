"""Reductions of a sharded dim of which each rank has one of its part, and the extremum is meant."""

from collections.abc import Mapping
from typing import Final

import torch

from shardmap_torch.checker.spmd.layout import ANY, Dim, axes_of
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.sharded import Rule, Sharded, Step
from shardmap_torch.core.torch_private.engine import OpOverload

Pending = frozenset[tuple[str, str]]

aten = torch.ops.aten


def extremum(kind: str) -> Rule:
    """Makes the rule of a reduction that is the `kind`, "max" or "min", of those of parts.

    Positions of extrema, the second result, are each rank's own.
    """

    def rule(step: Step) -> list[Sharded]:
        x, rank = step.arguments["self"], len(step.arguments["self"].dims)
        given = step.arguments.get("dim")
        listed = range(rank) if given is None else [given] if isinstance(given, int) else given
        over = {dim % rank for dim in listed} if rank else set()
        axes = frozenset(axis for dim in over for axis in axes_of(x.dims[dim]))
        if not axes or any(x.dims[dim] == ANY for dim in over):
            return by_dtensor(step)
        left: list[Dim | None] = [None if at in over else each for at, each in enumerate(x.dims)]
        kept = [() if each is None and step.arguments.get("keepdim") else each for each in left]
        dims = tuple(dim for dim in kept if dim is not None)
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


def carried(op: OpOverload, dtype: torch.dtype, pending: Pending) -> Mapping[str, str]:
    """Returns the extrema that are pending after an operation, given those of an operand.

    Example:
        >>> carried(aten.logical_not.default, torch.bool, frozenset({("dp", "max")}))
        {'dp': 'min'}
        >>> carried(aten.neg.default, torch.int64, frozenset({("dp", "max")}))
        {}
    """
    through = _MONOTONE.get(op, {}) if dtype == torch.bool else {}
    return {axis: through[kind] for axis, kind in pending if kind in through}

"""Casts at the boundary: the conversions and collectives that a spec implies for a leaf."""

from collections.abc import Sequence

from torch import Tensor

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective, Operation
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.caching import memo
from shardmap_torch.spec import P
from shardmap_torch.types import I, Partial, R, V


def apply(backend: Backend, operations: Sequence[Operation], x: Tensor) -> Tensor:
    """Applies one operation after the other."""
    for operation in operations:
        x = bind(backend, operation, x)
    return x


@memo
def entry_shards(spec: P) -> tuple[Collective, ...]:
    """Returns the conversions that shard a global value, or make it partial."""
    conversions = [Collective("convert", I, V, axes, dim=dim) for dim, axes in spec.sharded_dims]
    partial = tuple(sorted(spec.partial))
    if partial:
        conversions.append(Collective("convert", I, Partial, partial))
    return tuple(conversions)


def entry_casts(spec: P) -> tuple[Collective, ...]:
    """Returns the conversion that makes an invariant argument replicate, if the spec says so."""
    axes = tuple(sorted(spec.replicate))
    return (Collective("convert", I, R, axes),) if axes else ()


def exit_casts(spec: P) -> tuple[Collective, ...]:
    """Returns the conversion that makes a replicate result invariant, if the spec says so."""
    axes = tuple(sorted(spec.replicate))
    return (Collective("convert", R, I, axes),) if axes else ()


@memo
def exit_joins(spec: P) -> tuple[Collective, ...]:
    """Returns the collectives that make a result global on every rank."""
    joins = [
        Collective("all_gather", V, I, axes, dim=dim) for dim, axes in reversed(spec.sharded_dims)
    ]
    partial = tuple(sorted(spec.partial))
    if partial:
        joins.insert(0, Collective("all_reduce", Partial, I, partial))
    return tuple(joins)

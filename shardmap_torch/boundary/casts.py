"""Casts at the boundary: the conversions and collectives that a spec implies for a leaf."""

from collections.abc import Iterable, Sequence
from typing import Any

from torch import Tensor

from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.collectives.autograd import bind, is_transformed
from shardmap_torch.collectives.operations import Collective, Operation, collective_of
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.caching import memo
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, Partial, R, V


def apply(backend: Backend, operations: Sequence[Operation], x: Tensor) -> Tensor:
    """Applies one operation after the other."""
    for operation in operations:
        x = bind(backend, operation, x)
    return x


def apply_all(
    backend: Backend, operations_of: Iterable[tuple[int, Sequence[Operation]]], values: list[Any]
) -> None:
    """Applies to values in a list, by their places, one operation after the other.

    Most are casts of what is not differentiated; see `bind`, of which this spares the calls.
    """
    alone: bool | None = None
    for place, operations in operations_of:
        for operation in operations:
            x, idle = values[place], False
            if type(operation) is Collective and operation.movement.still:
                idle = operation.keeps_dtype and not x.requires_grad
            if idle and alone is None:
                alone = isinstance(backend, RankBackend) and not is_transformed()
            if not (idle and alone):
                values[place] = bind(backend, operation, x)


def over(axes: Iterable[str], name: str, src: AxisType, dst: AxisType) -> tuple[Collective, ...]:
    """Returns the collective of that name and types over these axes, if there are any."""
    ordered = tuple(sorted(axes))
    return (collective_of(name, src, dst, ordered),) if ordered else ()


@memo
def entry_shards(spec: P) -> tuple[Collective, ...]:
    """Returns the conversions that shard a global value, or make it partial."""
    conversions = [Collective("convert", I, V, axes, dim=dim) for dim, axes in spec.sharded_dims]
    return (*conversions, *over(spec.partial, "convert", I, Partial))


def entry_casts(spec: P) -> tuple[Collective, ...]:
    """Returns the conversion that makes an invariant argument replicate, if the spec says so."""
    return over(spec.replicate, "convert", I, R)


def exit_casts(spec: P) -> tuple[Collective, ...]:
    """Returns the conversion that makes a replicate result invariant, if the spec says so."""
    return over(spec.replicate, "convert", R, I)


@memo
def exit_joins(spec: P) -> tuple[Collective, ...]:
    """Returns the collectives that make a result global on every rank."""
    joins = [
        Collective("all_gather", V, I, axes, dim=dim) for dim, axes in reversed(spec.sharded_dims)
    ]
    return (*over(spec.partial, "all_reduce", Partial, I), *joins)

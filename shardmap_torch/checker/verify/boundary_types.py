"""Types, shapes and memory of values at the boundary of a call, as specs say."""

from collections.abc import Sequence
from typing import Final

from shardmap_torch.checker.ir.program import StorageType
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, K, Partial, R, V


def promised(spec: P, axis: str) -> AxisType:
    """Returns the type that a result's spec promises, before the spec's own conversion."""
    promise = spec.types.get(axis, I)
    return I if promise == R else promise  # `exit_casts` has converted R to I


def enters_as(spec: P, axis: str, mapped: Sequence[str]) -> AxisType:
    """Returns the type with which an input enters, before the conversions of the boundary."""
    axis_type = spec.types.get(axis)
    if axis_type is None:
        return K if axis in mapped else I
    return {"S": V, "P": Partial}.get(axis_type.kind, I)


def seeded_as(spec: P, axis: str) -> AxisType:
    """Returns the type with which the cotangent of a result enters: sharded like the result."""
    axis_type = spec.types.get(axis, I)
    return {"S": V, "P": R}.get(axis_type.kind, I)


def local_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Returns the shape of a rank's shard."""
    found = list(shape)
    for dim, axes in spec.sharded_dims:
        found[dim] //= mesh.num_ranks(axes)
    return tuple(found)


def global_shape(shape: tuple[int, ...], spec: P, mesh: Mesh) -> tuple[int, ...]:
    """Returns the global shape of a value whose shards have this shape."""
    found = list(shape)
    for dim, axes in spec.sharded_dims:
        found[dim] *= mesh.num_ranks(axes)
    return tuple(found)


_COPIES: Final = frozenset({"clone"})
"""Operations that copy here and may return their operand at run time: `contiguous`, `reshape`."""


def input_sharing(result: StorageType) -> int | None:
    """Returns the position of the input whose memory a result may have at run time.

    Here each conversion gives a storage of its own, since a storage has one type.
    """
    while result.leaf is None:
        made = result.made
        collective = None if made is None else made.collective
        is_view = collective is not None and collective.movement.shares
        if made is None or not (is_view or made.name in _COPIES):
            return None
        result = made.operands[0].storage_type
    return result.leaf

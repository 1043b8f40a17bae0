"""Reads from specs the types and shapes of values at the boundary of a call."""

from collections.abc import Sequence

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

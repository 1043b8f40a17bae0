"""AxisType: the type of a value along one mesh axis, one of I, R, V, S(i), Partial, K and Z.

A value in the body of a shard_mapped function has one type per mesh axis. Types exist in the
checker only: at run time every value is a plain tensor.

Source: JAX calls them invariant, reduced, varying and unreduced (`jax.shard_map`, `jax.typeof`);
S(i) is DTensor's `Shard(i)`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, TypeAlias

from shardmap_torch.errors import ShardTypeError


@dataclass(frozen=True, slots=True)
class AxisType:
    """The type of a value along one mesh axis.

    Attributes:
        kind: the letter of the type; P for Partial, which prints as `Partial`.
        dim: the tensor dimension that the shards concatenate along; S(i) only.

    Example:
        >>> V, S(1)
        (V, S(1))
    """

    kind: str
    dim: int | None = None

    def __hash__(self) -> int:
        """Hashes the letter alone, for speed: types are parts of many keys."""
        return hash(self.kind)

    def __repr__(self) -> str:
        """Prints as it is written in code: `I`, `V`, `S(1)`, `Partial`."""
        if self.kind == "P":
            return "Partial"
        return self.kind if self.dim is None else f"{self.kind}({self.dim})"

    @property
    def varies(self) -> bool:
        """Returns whether the ranks of the axis may have different values: V, S(i) and Partial."""
        return self.kind in ("V", "S", "P")


I = AxisType("I")  # noqa: E741 - JAX's and our name for invariant; a lone I reads well in a table
"""Invariant: equal on all ranks, one computation repeated; cotangents are equal as well."""
R = AxisType("R")
"""Replicate: equal on all ranks, used differently by each; cotangents are pending sums."""
V = AxisType("V")
"""Varying: may differ between the ranks."""
Partial = AxisType("P")
"""Partial: the global value is the sum over the ranks, which is pending."""
K = AxisType("K")
"""Uncommitted: equal on all ranks, neither I nor R yet."""
Z = AxisType("Z")
"""Zero on every rank, which is valid as any type."""

COTANGENT: Final[Mapping[AxisType, AxisType]] = {I: I, R: Partial, V: V, Partial: R}
"""The type of the cotangent of a value, by the type of the value."""


def S(dim: int) -> AxisType:  # noqa: N802 - reads as the type it makes, like DTensor's Shard(dim)
    """Makes the type of a varying value whose shards concatenate along `dim` to the global value.

    Example:
        >>> S(0)
        S(0)
    """
    return AxisType("S", dim)


TypeLike: TypeAlias = AxisType | str
_BY_NAME = {kind.kind: kind for kind in (I, R, V, Partial)}


def as_type(value: TypeLike) -> AxisType:
    """Reads a type or one of the strings "I", "R", "V", "P".

    Raises:
        ShardTypeError: `value` names no type.

    Example:
        >>> as_type("P") == Partial
        True
    """
    if isinstance(value, AxisType):
        return value
    if isinstance(value, str) and value in _BY_NAME:
        return _BY_NAME[value]
    raise ShardTypeError(
        f"{value!r} is no type; use I, R, V, Partial, or one of {sorted(_BY_NAME)}."
    )

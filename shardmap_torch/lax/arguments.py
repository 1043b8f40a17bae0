"""Reads the arguments of the `lax` functions: axes, groups, and the operand's type."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from types import MappingProxyType
from typing import Any, Final, Literal, TypeAlias, TypeVar

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.collectives.scope import Scope
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.ops.arguments import Axis, each_leaf, read_axes, read_items, shown
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V

X = TypeVar("X")

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions along an axis, every one in exactly one group, all groups of one size."""

WORDS: Final[Mapping[AxisType, str]] = MappingProxyType(
    {I: "invarying", R: "reduced", V: "varying", Partial: "unreduced"}
)
"""JAX's names of the types."""

ANY: Final = (I, R, V, Partial)
EQUAL_OR_VARYING: Final = (I, R, V)


@dataclass(frozen=True)
class Arguments:
    """The checked arguments that all functions share.

    Attributes:
        name: of the function.
        axes: the axes as a tuple.
        scope: in which they are bound.
        groups: the groups as tuples; empty where the axis is not split.
        src: the type of the operand that the user gives; None without one.
    """

    name: str
    axes: tuple[str, ...]
    scope: Scope
    groups: tuple[tuple[int, ...], ...]
    src: AxisType | None

    @property
    def num_ranks(self) -> int:
        """Counts the ranks of the axes."""
        return self.num_along(self.axes)

    @property
    def num_members(self) -> int:
        """Counts the ranks that contribute to one result."""
        return len(self.groups[0]) if self.groups else self.num_ranks

    def num_along(self, axes: tuple[str, ...]) -> int:
        """Counts the ranks along some of the axes."""
        return self.scope.backend.mesh.num_ranks(axes)

    def source(self, x: Tensor) -> "Source":
        """Returns the type of an operand: the user's, else the checker's, else V."""
        if self.src is not None:
            return Source(self.axes, (self.src,) * len(self.axes))
        types = self.scope.types_of(self.axes, x)
        return Source(self.axes, (V,) * len(self.axes) if types is None else types)

    def varying(self, x: Tensor) -> Tensor:
        """Casts an operand to V along all axes."""
        source = self.source(x)
        if not source.equal:
            return x
        uncommitted, copies = self.scope.read(x)
        return vary(x, source.committed(uncommitted), copies)


@dataclass(frozen=True)
class Source:
    """The type of an operand along each of some axes."""

    axes: tuple[str, ...]
    types: tuple[AxisType, ...]

    def where(self, *types: AxisType) -> tuple[str, ...]:
        """Returns the axes along which it has one of these types."""
        pairs = zip(self.axes, self.types, strict=True)
        return tuple(axis for axis, type_ in pairs if type_ in types)

    def committed(self, to: AxisType) -> "Source":
        """Returns the types with `to` in the place of K."""
        return Source(self.axes, tuple(to if type_ == K else type_ for type_ in self.types))

    @property
    def equal(self) -> tuple[str, ...]:
        """The axes along which all ranks have the same value."""
        return self.where(I, R, K)

    @property
    def varying(self) -> tuple[str, ...]:
        """The other axes; zeros count as varying, which costs no cast."""
        return tuple(axis for axis in self.axes if axis not in self.equal)


def vary(x: Tensor, source: Source, copies: AxisType) -> Tensor:
    """Casts to V along the axes over which `x` is equal, or to R where `copies` are."""
    invariant, equal = source.where(I), source.equal
    if invariant:
        x = ops.convert(x, invariant, src=I, dst=R)
    return ops.reinterpret(x, equal, src=R, dst=V) if equal and copies == V else x


def copied(x: Tensor, arguments: Arguments) -> Tensor:
    """Types copies, which are R, as JAX calls them: varying, where that means something."""
    _, copies = arguments.scope.read(x)
    return ops.reinterpret(x, arguments.axes, src=R, dst=V) if copies == V else x


def combined(x: Tensor, source: Source, scope: Scope, op: Literal["sum", "max", "min"]) -> Tensor:
    """All-reduces over the axes along which `x` varies, and casts it to I where it is R."""
    if source.varying:
        x = spread(ops.all_reduce(x, source.varying, dst=I, op=op), source.varying, scope)
    replicate = source.where(R)
    return ops.convert(x, replicate, src=R, dst=I) if replicate else x


def spread(x: Tensor, axes: tuple[str, ...], scope: Scope) -> Tensor:
    """Casts a result of type I to R, where the checker found that it meets what varies."""
    return ops.convert(x, axes, src=I, dst=R) if scope.is_cast() else x


def read(
    name: str,
    axis_name: Axis,
    src: TypeLike | None,
    allowed: Sequence[AxisType],
    groups: Groups | None = None,
) -> Arguments:
    """Reads and checks the arguments; `allowed` are the types that `src` may have."""
    axes, scope = read_axes(name, axis_name)
    source_type = None if src is None else read_type(name, "src", src, allowed)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    return Arguments(name, axes, scope, _read_groups(name, groups, axes, num_ranks), source_type)


def read_type(name: str, word: str, value: TypeLike, allowed: Sequence[AxisType]) -> AxisType:
    """Reads a type by our name or by JAX's."""
    for type_ in allowed if isinstance(value, str | AxisType) else ():
        if value == type_ or value in (type_.kind, WORDS[type_]):
            return type_
    known = ", ".join(WORDS[type_] for type_ in allowed)
    raise CollectiveError(f"{name}: {word}={show(value)} is none of {known}.")


def each_leaf_or_number(
    name: str, x: X, on_tensor: Callable[[Tensor], Tensor], on_number: Callable[[Any], Any]
) -> X:
    """Applies `on_tensor` or `on_number` to every leaf."""

    def one(leaf: Any) -> Any:
        return on_number(leaf) if isinstance(leaf, Number) else each_leaf(name, leaf, on_tensor)

    result: X = map_leaves(one, x)
    return result


def _read_groups(
    name: str, groups: Groups | None, axes: tuple[str, ...], num_ranks: int
) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return ()
    word = "axis_index_groups"
    members = tuple(read_items(name, word, group) for group in read_items(name, word, groups))
    ranks = [rank for group in members for rank in group]
    if not all(isinstance(r, int) for r in ranks) or sorted(ranks) != list(range(num_ranks)):
        raise CollectiveError(
            f"{name}: axis_index_groups={show([list(group) for group in members])} must name each "
            f"of the {num_ranks} ranks of {shown(axes)} exactly once."
        )
    if len({len(group) for group in members}) > 1:
        raise CollectiveError(
            f"{name}: axis_index_groups={[list(group) for group in members]} have different sizes. "
            "All ranks run one program on values of one shape, so groups must be equally large."
        )
    return members

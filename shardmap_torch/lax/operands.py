"""Arguments of the collectives of `lax`: axes, groups of ranks, and operands with JAX's casts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, Literal, TypeVar

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.ops.arguments import Axis, each_leaf, read_axes, shown
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V

X = TypeVar("X")

WORDS: Final = {I: "invarying", R: "reduced", V: "varying", Partial: "unreduced"}
"""JAX's names of the types."""

Source = TypeLike | None  # the type of an operand; None where the checker knows it


@dataclass(frozen=True)
class Call:
    """The arguments that all collectives of `lax` share.

    Attributes:
        name: of the function.
        axes: the axes as a tuple.
        src: the type of the operand that the user gives; None without one.
        scope: has what the checker found, which decides JAX's casts.
    """

    name: str
    axes: tuple[str, ...]
    src: AxisType | None
    scope: Any

    @property
    def num_members(self) -> int:
        """Counts the ranks that contribute to one result."""
        return ops.axis_size(self.axes)

    def map(self, function: Callable[[Tensor], Tensor], x: X) -> X:
        """Applies a function to every leaf, all of which must be tensors of the type `src`."""
        src = self.src  # the identity, of which the checker requires the type
        if src is not None:
            x = each_leaf(self.name, x, lambda leaf: ops.convert(leaf, self.axes, src=src, dst=src))
        return each_leaf(self.name, x, function)

    def map_numbers(
        self, function: Callable[[Tensor], Tensor], x: X, on_number: Callable[[Any], Any]
    ) -> X:
        """Maps like `map`, but Python numbers by a function of their own."""

        def one(leaf: Any) -> Any:
            return on_number(leaf) if isinstance(leaf, Number) else self.map(function, leaf)

        result: X = map_leaves(one, x)
        return result

    def extremum(self, op: Literal["max", "min"], x: X) -> X:
        """Takes the extremum of every leaf over the axes, on all of which numbers are equal."""
        return self.map_numbers(
            lambda leaf: self.reduced(leaf, self.types(leaf), op), x, lambda number: number
        )

    def types(self, x: Tensor, unknown: AxisType | None = None) -> dict[str, AxisType]:
        """Returns the type of an operand along each axis: the user's, the checker's, or unknown.

        Without `unknown` that is V: Dynamo does not know a type that is the default of a method.
        """
        found = None if self.src is not None else self.scope.types_of(self.axes, x)
        if found is None:
            return dict.fromkeys(self.axes, self.src or unknown or V)
        return dict(zip(self.axes, found, strict=True))

    def varying(self, x: Tensor) -> Tensor:
        """Casts an operand to V along all axes."""
        types = self.types(x)
        return self.cast(x, types) if where(types, I, R, K) else x

    def cast(self, x: Tensor, types: Mapping[str, AxisType]) -> Tensor:
        """Casts to V along the axes over which `x` is equal; to R where the checker reads it so."""
        uncommitted, copies = self.scope.read(x)
        types = {axis: uncommitted if type_ == K else type_ for axis, type_ in types.items()}
        if invariant := where(types, I):
            x = ops.convert(x, invariant, src=I, dst=R)
        equal = where(types, I, R)
        return ops.reinterpret(x, equal, src=R, dst=V) if equal and copies == V else x

    def reduced(
        self, x: Tensor, types: Mapping[str, AxisType], op: Literal["sum", "max", "min"]
    ) -> Tensor:
        """All-reduces over the axes along which `x` varies, and casts it to I where it is R."""
        equal = where(types, I, R, K)
        # Zeros count as varying, which costs no cast.
        if varying := [axis for axis in self.axes if axis not in equal]:
            x = self.spread(ops.all_reduce(x, varying, dst=I, op=op), varying)
        replicate = where(types, R)
        return ops.convert(x, replicate, src=R, dst=I) if replicate else x

    def spread(self, x: Tensor, axes: Sequence[str]) -> Tensor:
        """Casts a result of type I to R, where the checker found that it meets what varies."""
        return ops.convert(x, axes, src=I, dst=R) if self.scope.is_cast() else x

    def copied(self, x: Tensor) -> Tensor:
        """Types copies, which are R, as JAX calls them: varying, where that means something."""
        _, copies = self.scope.read(x)
        return ops.reinterpret(x, self.axes, src=R, dst=V) if copies == V else x


def where(types: Mapping[str, AxisType], *among: AxisType) -> list[str]:
    """Returns the axes along which a value has one of these types."""
    return [axis for axis, type_ in types.items() if type_ in among]


def read(
    name: str, axis: Axis, src: Source, groups: Any = None, allowed: Sequence[AxisType] = (I, R, V)
) -> Call:
    """Reads and checks the arguments; `allowed` are the types that `src` may have."""
    axes, scope = read_axes(name, axis)
    if groups is not None:
        raise CollectiveError(
            f"{name}: axis_index_groups={show(groups)} splits {shown(axes)}, and each group would "
            "have a result of its own. Give the groups an axis of their own, by make_mesh(..., "
            "views=), and name the other one here."
        )
    source = None if src is None else read_type(name, "src", src, allowed)
    return Call(name, axes, source, scope)


def read_type(name: str, word: str, value: TypeLike, allowed: Sequence[AxisType]) -> AxisType:
    """Reads a type by our name or by JAX's."""
    for type_ in allowed if isinstance(value, str | AxisType) else ():
        if value == type_ or value in (type_.kind, WORDS[type_]):
            return type_
    known = ", ".join(WORDS[type_] for type_ in allowed)
    raise CollectiveError(f"{name}: {word}={show(value)} is none of {known}.")

"""Arguments of the collectives of `lax`: axes, groups of ranks, and operands with JAX's casts."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Number
from typing import Any, Final, Literal, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.ops.arguments import Axis, each_leaf, read_axes, read_items, shown
from shardmap_torch.types import AxisType, I, K, Partial, R, TypeLike, V

X = TypeVar("X")

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions along an axis, every one in exactly one group, all groups of one size."""

WORDS: Final = {I: "invarying", R: "reduced", V: "varying", Partial: "unreduced"}
"""JAX's names of the types."""


@dataclass(frozen=True)
class Call:
    """The arguments that all collectives of `lax` share.

    Attributes:
        name: of the function.
        axes: the axes as a tuple.
        groups: tuples of positions; empty where the axis is not split.
        src: the type of the operand that the user gives; None without one.
        scope: has what the checker found, which decides JAX's casts.
    """

    name: str
    axes: tuple[str, ...]
    groups: tuple[tuple[int, ...], ...]
    src: AxisType | None
    scope: Any

    @property
    def num_members(self) -> int:
        """Counts the ranks that contribute to one result."""
        return len(self.groups[0]) if self.groups else ops.axis_size(self.axes)

    def map(self, function: Callable[[Tensor], Tensor], x: X) -> X:
        """Applies a function to every leaf, all of which must be tensors."""
        return each_leaf(self.name, x, function)

    def map_numbers(
        self, function: Callable[[Tensor], Tensor], x: X, on_number: Callable[[Any], Any]
    ) -> X:
        """Maps like `map`, but Python numbers by a function of their own."""

        def one(leaf: Any) -> Any:
            return on_number(leaf) if isinstance(leaf, Number) else self.map(function, leaf)

        result: X = map_leaves(one, x)
        return result

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

    def by_member(self, x: Tensor) -> Tensor:
        """Stacks the values of the group's members along a new leading dim, in its order.

        All ranks of a group get the values in one order, so that sums of them are bit-equal.
        """
        every = ops.all_gather(self.varying(x), self.axes, tiled=False, dst=R)
        return every.index_select(0, self._of_rank([list(group) for group in self.groups], x))

    def exchanged(self, x: Tensor, word: str, dim: int, tiled: bool) -> Tensor:
        """Splits `dim` over the group; stacks the parts for this rank, in the group's order."""
        size, length = self.num_members, x.shape[dim]
        if length % size or (not tiled and length != size):
            need = "a multiple of" if tiled else "exactly"
            raise CollectiveError(
                f"{self.name}: {word} has size {length}; it must be {need} {size}, the size of the "
                f"axis_index_groups of {shown(self.axes)}."
            )
        parts = x.unflatten(dim, (size, length // size)) if tiled else x
        own = self._of_rank([[place] for place in range(size)], x, by_place=True)
        return self.by_member(parts.movedim(dim, 0)).index_select(1, own).squeeze(1)

    def _of_rank(
        self, rows: Sequence[Sequence[int]], like: Tensor, by_place: bool = False
    ) -> Tensor:
        """Looks up the row of this rank's group, or of its place in the group."""
        of_rank = {
            rank: rows[place if by_place else number]
            for number, group in enumerate(self.groups)
            for place, rank in enumerate(group)
        }
        table = torch.tensor([of_rank[rank] for rank in range(len(of_rank))], device=like.device)
        index = ops.axis_index(self.axes).to(like.device)
        return table.index_select(0, index.reshape(1)).squeeze(0)


def where(types: Mapping[str, AxisType], *among: AxisType) -> list[str]:
    """Returns the axes along which a value has one of these types."""
    return [axis for axis, type_ in types.items() if type_ in among]


def join(stacked: Tensor, dim: int, tiled: bool) -> Tensor:
    """Moves the leading dim to `dim`, or merges it into it."""
    placed = stacked.movedim(0, dim)
    return placed.flatten(dim, dim + 1) if tiled else placed


def read(
    name: str,
    axis_name: Axis,
    src: TypeLike | None,
    groups: Groups | None = None,
    allowed: Sequence[AxisType] = (I, R, V),
) -> Call:
    """Reads and checks the arguments; `allowed` are the types that `src` may have."""
    axes, scope = read_axes(name, axis_name)
    source = None if src is None else read_type(name, "src", src, allowed)
    return Call(name, axes, _read_groups(name, groups, axes), source, scope)


def read_type(name: str, word: str, value: TypeLike, allowed: Sequence[AxisType]) -> AxisType:
    """Reads a type by our name or by JAX's."""
    for type_ in allowed if isinstance(value, str | AxisType) else ():
        if value == type_ or value in (type_.kind, WORDS[type_]):
            return type_
    known = ", ".join(WORDS[type_] for type_ in allowed)
    raise CollectiveError(f"{name}: {word}={show(value)} is none of {known}.")


def _read_groups(
    name: str, groups: Groups | None, axes: tuple[str, ...]
) -> tuple[tuple[int, ...], ...]:
    if groups is None:
        return ()
    word, num_ranks = "axis_index_groups", ops.axis_size(axes)
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

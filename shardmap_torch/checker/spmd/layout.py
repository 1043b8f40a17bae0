"""Layout algebra: maps the ranks' shards to the tensor on one device, dim by dim.

Global strictness compares a program with itself on one device. A tensor of the ranks' program is
a shard of a tensor of the other. The position of an entry along a dim is a number in mixed radix;
a rank has the entries for which some digits, one for each axis that shards the dim, are its own
index. `P("tp")` makes the first digit of dim 0 such a digit; in merged dims, as a matrix product
of four dims merges batch and heads, it comes further back.

The rules here need only the shapes of both programs, so that a literal size may be any number in
either. They raise `UnrelatedError` where the results would not be shards of one another.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, combinations
from math import prod
from typing import Final, TypeAlias

from torch import Tensor

from shardmap_torch.core.caching import Memo, lazy
from shardmap_torch.spec import Entry, P

Shape: TypeAlias = tuple[int, ...]
Sizes: TypeAlias = Mapping[str, int]

Digit: TypeAlias = tuple[str | None, int]
"""A digit of a position: the axis whose index it is, or None if a rank has all; and its base."""

Dim: TypeAlias = tuple[Digit, ...]
"""The digits of a dim, most significant first, none of base 1; adjacent unsharded ones merged."""

ANY: Final[Dim] = (("...", 0),)
"""A dim along which all entries are equal, so that any sharding of this length matches."""


def counted(step: int) -> Dim:
    """Stands for 0, step, 2 * step, and so on: positions among the entries that a rank has.

    They are not those of the same entries on one device, and serve to pick each entry once.
    """
    return (("#", step),)


def step_of(dim: Dim) -> int | None:
    """The step of what counts a rank's own entries; None for any other dim."""
    return dim[0][1] if dim and dim[0][0] == "#" else None


class UnrelatedError(Exception):
    """Raised when a result of the ranks' program is no shard of the result on one device."""

    def __init__(self, reason: str, fix: str = "", first: Tensor | None = None) -> None:
        """Takes the end of a sentence about the operation, and what to write instead.

        With `first`, the mistake is where the first of the steps is that have made that.
        """
        super().__init__(reason)
        self.reason, self.fix, self.first = reason, fix, first


def size_of_one_rank(what: str = "the size of an operand") -> UnrelatedError:
    """Makes the error of equal entries of which it is not known how they are sharded."""
    return UnrelatedError(f"{what} is that of one rank, and matches no sharding yet")


def reject_bias(partial: frozenset[str]) -> None:
    """Refuses to add a bias to what is a pending sum over some axes.

    Raises:
        UnrelatedError: there are some.
    """
    if partial:
        raise UnrelatedError(
            f"it adds a bias to a pending sum over {min(partial)!r}: the bias would be counted "
            "once per rank",
            f"add the bias after the all_reduce over {min(partial)!r}.",
        )


def unsharded(size: int) -> Dim:
    """Returns an unsharded dim."""
    return () if size == 1 else ((None, size),)


def sharded_dim(size: int, axes: Sequence[str], sizes: Sizes) -> Dim:
    """Returns a dim of that global size, sharded over the axes as in a `P`, major first.

    Example:
        >>> sharded_dim(12, ("dp", "tp"), {"dp": 2, "tp": 2})
        (('dp', 2), ('tp', 2), (None, 3))
    """
    rest = size // prod(sizes[axis] for axis in axes)
    return (*((axis, sizes[axis]) for axis in axes), *unsharded(rest))


def numbers_of_shards(sizes: Sizes) -> Iterator[int]:
    """Yields how many shards there are over some of the axes, one first.

    Example:
        >>> list(numbers_of_shards({"dp": 2, "tp": 3}))
        [1, 2, 3, 6]
    """
    for length in range(len(sizes) + 1):
        yield from map(prod, combinations(sizes.values(), length))


def axes_of(dim: Dim) -> tuple[str, ...]:
    """The axes that shard a dim, most significant first."""
    if not dim or dim == ANY or step_of(dim) is not None:
        return ()
    return tuple([axis for axis, _ in dim if axis is not None])


def distinct(dims: Iterable[Dim]) -> list[Dim]:
    """Each of them once: not a set, since sizes that are symbols have no hash."""
    found: list[Dim] = []
    for dim in dims:
        if dim not in found:
            found.append(dim)
    return found


def in_words(dim: Dim) -> str:
    """Describes how a dim is sharded.

    Example:
        >>> in_words((("dp", 2), (None, 4))), in_words(((None, 8),))
        ("sharded over 'dp'", 'unsharded')
        >>> in_words(((None, 2), ("tp", 4)))
        "sharded over 'tp' within each of 2 blocks"
    """
    if step_of(dim) is not None:
        return "counted by each rank from 0"
    axes = axes_of(dim)
    if not axes:
        return "unsharded"
    blocks = f" within each of {dim[0][1]} blocks" if dim[0][0] is None else ""
    return f"sharded over {', '.join(map(repr, axes))}{blocks}"


@dataclass(frozen=True)
class ShardedTensor:
    """The layout by which a tensor of the ranks' program shards its tensor on one device.

    Attributes:
        dims: how each dim is sharded.
        local: its shape on a rank.
        global_shape: its shape on one device.
        of_zeros: whether this is known only as long as its memory is zeros.
    """

    dims: tuple[Dim, ...]
    local: Shape
    global_shape: Shape
    of_zeros: bool = False

    @staticmethod
    def unsharded(shape: Shape) -> "ShardedTensor":
        """Returns the layout of an unsharded tensor."""
        return ShardedTensor(tuple(map(unsharded, shape)), shape, shape)

    def sharded_by(self, axis: str) -> int | None:
        """Returns the dim that an axis shards, or None."""
        return next((dim for dim, digits in enumerate(self.dims) if axis in axes_of(digits)), None)

    @lazy
    def axes(self) -> tuple[str, ...]:
        """All axes that shard a dim."""
        return tuple(axis for dim in self.dims for axis in axes_of(dim))

    def spec(self, partial: frozenset[str] = frozenset()) -> P:
        """Returns the spec of this layout, as in `P('dp', None)`."""
        return P(*map(_entry, self.dims), partial=partial)

    def part(self, dims: Sequence[int]) -> "ShardedTensor":
        """Returns the layout of these dims only, in this order."""
        return ShardedTensor(
            tuple(self.dims[dim] for dim in dims),
            tuple(self.local[dim] for dim in dims),
            tuple(self.global_shape[dim] for dim in dims),
        )


def _entry(dim: Dim) -> Entry:
    axes = axes_of(dim)
    return axes[0] if len(axes) == 1 else (axes or None)


def fitted(dims: Sequence[Dim], local: Shape, global_shape: Shape) -> ShardedTensor:
    """Returns the layout, after checking that the shapes are those of such a sharding.

    Raises:
        UnrelatedError: they are not.
    """
    key = tuple(dims), local, global_shape
    return _FITTED.get(key, lambda: _fitted(*key))


_FITTED: Final = Memo[ShardedTensor](4096)


def _fitted(dims: tuple[Dim, ...], local: Shape, global_shape: Shape) -> ShardedTensor:
    for number, (dim, mine, all_) in enumerate(zip(dims, local, global_shape, strict=True)):
        if dim == ANY or step_of(dim) is not None:
            continue
        here = prod(base for axis, base in dim if axis is None)
        there = prod(base for _, base in dim)
        if (here, there) != (mine, all_):
            ranks = there // here
            all_ranks = f"each of {ranks} ranks, which together are {mine * ranks},"
            some = all_ranks if ranks > 1 else "a rank"
            raise UnrelatedError(
                f"dim {number} of the result, {in_words(dim)}, has size {mine} on {some} "
                f"and one device would have {all_} there",
                "write sizes that are right on one device too: -1, x.shape[...], or a size "
                "divided by axis_size(axis); in a module that is parallelized, LocalAttributes "
                "divides those that it keeps.",
            )
    shard = ShardedTensor(dims, local, global_shape)
    axes = shard.axes
    twice = [axis for axis in axes if axes.count(axis) > 1]
    if twice:
        raise UnrelatedError(
            f"{twice[0]!r} shards two dims of the result, of which the ranks then have blocks on "
            "the diagonal only",
            f"gather one operand over {twice[0]!r} first; wrap code that goes from block to block, "
            "as a ring does, in local_region(f, in_types, out_types).",
        )
    return shard


# ---------------------------------------------------------------------------------- results


def broadcast(operands: Sequence[ShardedTensor], rank: int) -> tuple[Dim, ...]:
    """Lays out the result of a pointwise operation like each operand that is not expanded.

    Example:
        >>> x = ShardedTensor((sharded_dim(8, ["dp"], {"dp": 2}), unsharded(2)), (4, 2), (8, 2))
        >>> broadcast([x, ShardedTensor.unsharded((2,))], 2) == x.dims
        True
    """
    return tuple(
        agreed(
            [x.dims[dim - rank] for x in operands if _at(x.global_shape, dim - rank) != 1],
            f"dim {dim}",
        )
        for dim in range(rank)
    )


def _at(shape: Shape, index: int) -> int:
    return shape[index] if len(shape) >= -index else 1


def agreed(dims: Sequence[Dim], what: str) -> Dim:
    """Returns the one sharding that matching dims of several operands must have."""
    types = distinct(dim for dim in dims if dim != ANY)
    if len(types) > 1:
        first, second = sorted(types, key=lambda dim: len(axes_of(dim)))[:2]
        raise UnrelatedError(
            f"{what} is {in_words(first)} in one operand and {in_words(second)} in another"
            + ("" if axes_of(first) != axes_of(second) else ", in another way"),
            "shard the operand that is not sharded, with convert(x, axis, src=R, dst=V, dim=...), "
            "or gather the other.",
        )
    return types.pop() if types else (ANY if dims else ())


def reshape(x: ShardedTensor, global_shape: Shape) -> tuple[Dim, ...]:
    """Lays out a tensor after its entries have been read, in order, into another shape.

    Example:
        >>> x = ShardedTensor((unsharded(5), sharded_dim(12, ["tp"], {"tp": 2})), (5, 6), (5, 12))
        >>> reshape(x, (5, 4, 3))  # four heads of three, two on each rank
        (((None, 5),), (('tp', 2), (None, 2)), ((None, 3),))
    """
    if ANY in x.dims and 0 not in global_shape:
        at = x.dims.index(ANY)
        before, kept = prod(x.global_shape[:at]), x.global_shape[at]
        for place, size in enumerate(global_shape):
            if size == kept and prod(global_shape[:place]) == before:
                front = reshape(x.part(range(at)), global_shape[:place])
                back = x.part(range(at + 1, len(x.dims)))
                return (*front, ANY, *reshape(back, global_shape[place + 1 :]))
    if ANY in x.dims or 0 in global_shape:
        if x.global_shape == global_shape or (not x.axes and ANY not in x.dims):
            return x.dims if x.global_shape == global_shape else tuple(map(unsharded, global_shape))
        raise size_of_one_rank("its operand's size")
    digits = merged([digit for dim in x.dims for digit in dim])
    return tuple(_take(size, digits, x, global_shape) for size in global_shape)


def _take(size: int, digits: list[Digit], x: ShardedTensor, global_shape: Shape) -> Dim:
    """Removes the digits of one dim from the front of the list."""
    digits_taken: list[Digit] = []
    while size > 1:
        axis, base = digits.pop(0)
        if size % base == 0:
            digits_taken.append((axis, base))
            size //= base
        elif axis is None and base % size == 0:
            digits_taken.append((None, size))
            digits.insert(0, (None, base // size))
            size = 1
        else:
            blocked = axis or next((name for name, _ in digits if name is not None), "nothing")
            raise UnrelatedError(
                f"what {blocked!r} shards does not stay together when the "
                f"{'x'.join(map(str, x.global_shape))} entries on one device are laid out as "
                f"{'x'.join(map(str, global_shape))}"
                + (f": {size} does not divide over {axis!r} = {base} ranks" if axis else ""),
                (f"take a multiple of {base} there, as of heads; or " if axis else "")
                + "keep the sharded dim, or make it the first of those that are split off it.",
            )
    return tuple(digits_taken)


def merged(digits: Iterator[Digit] | Sequence[Digit]) -> list[Digit]:
    """Uncut digits side by side are one."""
    found: list[Digit] = []
    for axis, base in digits:
        if axis is None and found and found[-1][0] is None:
            found[-1] = (None, found[-1][1] * base)
        elif base != 1:
            found.append((axis, base))
    return found


def expand_dims(x: ShardedTensor, local: Shape, global_shape: Shape) -> tuple[Dim, ...]:
    """Lays out a tensor after dims of size 1 have been expanded, and dims put in front."""
    offset = len(global_shape) - len(x.global_shape)
    repeated = fill(local, global_shape)
    return tuple(
        repeated[dim]
        if dim < offset or (x.global_shape[dim - offset] == 1 and size != 1)
        else x.dims[dim - offset]
        for dim, size in enumerate(global_shape)
    )


def fill(local: Shape, global_shape: Shape) -> tuple[Dim, ...]:
    """Lays out a tensor of equal entries: any sharding will do where the sizes differ."""
    return tuple(
        unsharded(mine) if mine == all_ else ANY
        for mine, all_ in zip(local, global_shape, strict=True)
    )


def dims_by_size(
    local: Shape, global_shape: Shape, sizes: Sizes, likely: Sequence[tuple[str, ...]] = ()
) -> tuple[Dim, ...]:
    """Guesses the layout of a tensor by its sizes, from the first axes that fit; types confirm it.

    Axes that are likely to shard a dim together come before all others.

    Example:
        >>> dims_by_size((2, 1), (4, 1), {"dp": 2, "tp": 2})
        ((('dp', 2), (None, 2)), ())
    """
    found: list[Dim] = []
    free = [*sizes]
    for mine, all_ in zip(local, global_shape, strict=True):
        some = chain.from_iterable(combinations(free, count) for count in range(1, len(free) + 1))
        fitting = (
            names
            for names in ((), *(axes for axes in likely if {*axes} <= {*free}), *some)
            if mine * prod(sizes[axis] for axis in names) == all_
        )
        names = next(fitting, None)
        found.append(ANY if names is None else sharded_dim(all_, names, sizes))
        free = [axis for axis in free if axis not in (names or ())]
    return tuple(found)


def settled(x: ShardedTensor, sizes: Sizes) -> ShardedTensor:
    """Returns a layout with axes for dims of equal entries, which any that fit suit.

    Raises:
        UnrelatedError: none fit.
    """
    own = x.part([at for at, dim in enumerate(x.dims) if dim == ANY])
    free = {axis: size for axis, size in sizes.items() if axis not in x.axes}
    found = iter(dims_by_size(own.local, own.global_shape, free))
    dims = tuple([next(found) if dim == ANY else dim for dim in x.dims])
    if ANY in dims:
        raise size_of_one_rank()
    return replace(x, dims=dims)


# ------------------------------------------------------------------------------ collectives


def gathered(dim: Dim, axes: Sequence[str]) -> Dim | None:
    """Returns a dim after the ranks' shards have been concatenated, or None if that is no layout.

    The ranks' index becomes the first digit of the result, and must have been the first before.

    Example:
        >>> gathered(sharded_dim(12, ("dp", "tp"), {"dp": 2, "tp": 2}), ("tp",))
        (('dp', 2), (None, 6))
        >>> gathered(((None, 3), ("tp", 2), (None, 2)), ("tp",)) is None
        True
    """
    inner = [axis for axis, _ in dim if axis is None or axis in axes]
    if dim == ANY or inner[: len(axes)] != list(axes):
        return None
    return tuple(merged([(None if axis in axes else axis, base) for axis, base in dim]))


def sliced(dim: Dim, axes: Sequence[str], sizes: Sizes) -> Dim | None:
    """Returns a dim after each rank has kept its slice of it, or None if that is no layout.

    Example:
        >>> sliced((("dp", 2), (None, 6)), ("tp",), {"tp": 2})
        (('dp', 2), ('tp', 2), (None, 3))
    """
    for axis in axes:
        at = next((i for i, (name, _) in enumerate(dim) if name is None), None)
        if dim == ANY or at is None or dim[at][1] % sizes[axis]:
            return None
        rest = dim[at][1] // sizes[axis]
        dim = (*dim[:at], (axis, sizes[axis]), *unsharded(rest), *dim[at + 1 :])
    return dim

"""Python numbers that differ by rank, as `group.rank()` gives them, and what torch does with them.

A body that asks for its rank is another Python program on each. It is interpreted once all the
same: the number is known by its values on all ranks, and Python's arithmetic is done for each.
Where torch gets one, the typed equivalent is interpreted: a tensor of type V, or the rank's own
part of a tensor. Whatever else would make the programs of ranks differ, such as a branch, is
refused.
"""

import math
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, wraps
from itertools import product
from typing import Any, Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.checker.ir.paths import COMPARISONS, AgainError, UnknownNumber, is_arithmetic
from shardmap_torch.checker.rewrites import functions
from shardmap_torch.checker.rewrites.copies import Host
from shardmap_torch.checker.rewrites.functions import dim_of_part, parts_of, read, write
from shardmap_torch.checker.rules.lattice import UNBRANCHED
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.collectives.scope import Scope, current_scope, enter_scope
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.mesh import Mesh
from shardmap_torch.ops.cast import convert
from shardmap_torch.types import I, R, V

_LIMIT: Final = 65_536
"""Maximal number of ranks whose values are computed, one by one."""

_PLAIN: Final = (bool, int, float)
_AS_TENSOR: Final = "keep it a tensor, with axis_index(axis), and choose with torch.where"
_AS_PART: Final = (
    "take this rank's part of a tensor, as in x.chunk(n, dim)[rank], x[rank * n : (rank + 1) * n] "
    "or x.narrow(dim, rank * n, n)"
)


@dataclass(eq=False)
class Asking:
    """Makes the numbers of one interpretation; the index of its backend is a tensor of type V."""

    host: Host
    backend: Backend

    @property
    def mesh(self) -> Mesh:
        """The mesh of the body."""
        return self.backend.mesh

    def rank_along(self, axes: tuple[str, ...]) -> "RankNumber":
        sizes = [self.mesh.shape[axis] for axis in axes]
        if math.prod(sizes) > _LIMIT:
            self.host.numbers.branches.refuse(
                f"this rank is asked for as a Python number, on {math.prod(sizes):,} ranks, and of "
                f"at most {_LIMIT:,} the programs are compared.",
                _AS_TENSOR + ".",
            )
        positions = tuple(range(math.prod(sizes)))
        return RankNumber(self, axes, positions, lambda: self.backend.index(axes))

    def reduced(self, number: "RankNumber") -> "RankNumber":
        """Returns the number without axes of several ranks along which it does not differ."""
        own = number
        for axis in number.axes:
            rest = tuple(other for other in own.axes if other != axis)
            if self.mesh.shape[axis] > 1 and rest:
                values = self.spread(own, (axis, *rest))
                first = values[: len(values) // self.mesh.shape[axis]]
                if values == first * self.mesh.shape[axis]:
                    own = RankNumber(self, rest, tuple(first), number.tensor)
        if len(own.values) > 1 and own.values == tuple(range(len(own.values))):
            own._tensor = partial(self.backend.index, own.axes)
        return own

    def spread(self, number: Any, axes: tuple[str, ...]) -> list[Any]:
        """Returns the values of a number for all positions along `axes`."""
        if type(number) is not RankNumber:
            return [number] * math.prod(self.mesh.shape[axis] for axis in axes)
        own = [axes.index(axis) for axis in number.axes]
        sizes = [self.mesh.shape[axis] for axis in number.axes]
        found = []
        for place in product(*(range(self.mesh.shape[axis]) for axis in axes)):
            at = 0
            for position, size in zip(own, sizes, strict=True):
                at = at * size + place[position]
            found.append(number.values[at])
        return found


class RankNumber(UnknownNumber):
    """A number that differs by rank, known on each.

    Attributes:
        axes: along which it differs, in mesh order.
        values: its values, the first axis major.
    """

    def __init__(
        self,
        asking: Asking,
        axes: tuple[str, ...],
        values: tuple[Any, ...],
        tensor: Callable[[], Tensor],
    ) -> None:
        self._asking, self.axes, self.values, self._tensor = asking, axes, values, tensor
        self.number_type = type(values[0])

    @property
    def asking(self) -> Asking:
        """Functions that make such numbers.

        Raises:
            ShardTypeError: the check that has made this one is over: the user's code has kept it.
        """
        scope = current_scope()
        if scope is None or scope.backend is not self._asking.backend:
            raise ShardTypeError(
                f"A rank that a body has asked for is used after its check, at {call_site()}: it "
                "is kept from one call to the next, as functools.cache does, and each rank has "
                "its own.\nFix: ask in each call, by a function that caches nothing."
            )
        return self._asking

    def tensor(self) -> Tensor:
        """Makes the tensor of type V that has the values."""
        assert self.asking
        return self._tensor()

    def combine(self, symbol: str, operation: Callable[[Any, Any], Any], a: Any, b: Any) -> Any:
        if not all(type(x) is RankNumber or isinstance(x, _PLAIN) for x in (a, b)):
            return NotImplemented  # a tensor, which takes it as one
        met = {axis for x in (a, b) if type(x) is RankNumber for axis in x.axes}
        axes = tuple(axis for axis in self.asking.mesh.axis_names if axis in met)
        pairs = zip(self.asking.spread(a, axes), self.asking.spread(b, axes), strict=True)
        values = tuple([operation(x, y) for x, y in pairs])
        made = RankNumber(self.asking, axes, values, lambda: operation(as_tensor(a), as_tensor(b)))
        return self.asking.reduced(made)

    def apply(self, name: str, operation: Callable[..., Any], *args: Any) -> Any:
        """Computes on each rank what tensors have by the same name."""
        if name not in ("neg", "pos", "abs"):
            return operation(self.plain(f"{name}()"), *args)
        values = tuple(map(operation, self.values))
        return RankNumber(self.asking, self.axes, values, lambda: operation(self.tensor()))

    def compare(self, symbol: str, other: Any) -> Any:
        return self.combine(symbol, COMPARISONS[symbol], self, other)

    def plain(self, what: str, advice: str = "") -> Any:
        """Returns the number if it is the same on all ranks."""
        if self.differs:
            self.refuse(f"{what} makes a plain Python number of one that differs by rank.", "")
        return self.values[0]

    @property
    def differs(self) -> bool:
        """Returns whether it differs by rank."""
        return any(value != self.values[0] for value in self.values)

    def along(self, axes: tuple[str, ...]) -> list[Any]:
        """Returns its values for the positions along axes.

        Raises:
            ShardTypeError: it differs along others too.
        """
        if not set(self.axes) <= set(axes):
            self.refuse(
                f"a peer along {axes} differs along {self.axes}.",
                "pass group_dst=, group_src= or group_peer=, which are positions in the group",
            )
        return self.asking.spread(self, axes)

    def refuse(self, what: str, advice: str) -> NoReturn:
        """Refuses a use of it that would make the programs of ranks differ."""
        self._asking.host.numbers.branches.refuse(
            what, (advice or f"{_AS_PART}, or {_AS_TENSOR}") + "."
        )

    def __divmod__(self, other: Any) -> Any:
        return self // other, self % other

    def __rdivmod__(self, other: Any) -> Any:
        return other // self, other % self

    def __bool__(self) -> bool:
        truths = {*map(bool, self.values)}
        if len(truths) > 1:
            self.refuse(
                "the body branches on a number that differs by rank: the ranks would run "
                "different programs.",
                f"{UNBRANCHED} Or {_AS_TENSOR}",
            )
        return truths.pop()

    def __index__(self) -> int:
        """Returns it as a position in a list or a number of steps, if it is the same on all."""
        # A mesh of one rank takes parts as others do.
        is_asked = self.differs or len(self.values) == 1
        if is_asked and not self.asking.host.numbers.branches.marks_parts:
            raise AgainError
        if self.differs:
            self.refuse(
                "a number that differs by rank is used as a position in a list, a size or a "
                "number of steps.",
                _AS_PART,
            )
        return operator.index(self.values[0])

    def __str__(self) -> str:
        """Formats it as `<rank 0, 1 along tp>`."""
        shown = ", ".join(map(str, self.values[:4])) + ", …" * (len(self.values) > 4)
        return f"<{shown} along {', '.join(self.axes)}>"


def as_tensor(value: Any) -> Any:
    """Returns the tensor of a number that differs by rank; other values as they are."""
    return value.tensor() if type(value) is RankNumber else value


def reject_returned(leaves: Sequence[Any]) -> None:
    """Refuses a number that differs by rank as a result: outside there is one."""
    for number in leaves:
        if type(number) is RankNumber:
            what = "a number that differs by rank is returned, and outside there is one."
            number.refuse(what, "return axis_index(axis).reshape(1), with a spec that shards it")


# ------------------------------------------------------------------------- in torch's functions


class Parts(tuple[Tensor, ...]):
    """Results of `chunk`, `split` and `unbind`, of which a rank may take its own.

    Attributes:
        cut: takes the part of each rank.
    """

    cut: Callable[[RankNumber], Tensor]

    def __getitem__(self, at: Any) -> Any:
        """Returns a part, or each rank's."""
        return self.cut(at) if type(at) is RankNumber else super().__getitem__(at)


CUTTING: Final = frozenset(
    (
        *(torch.chunk, Tensor.chunk, torch.split, Tensor.split, torch.tensor_split),
        *(Tensor.tensor_split, torch.unbind, Tensor.unbind),
    )
)
"""Functions that return the parts of a tensor along a dim."""


def marked(host: Host, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], out: Any) -> Any:
    """Returns the result of a function; parts of a tensor so that a rank may take its own."""
    if not (host.numbers.branches.marks_parts and func in CUTTING):
        return out
    made = Parts(out)
    made.cut = _cutting(host, func, args, kwargs, out)
    return made


def _cutting(
    host: Host, func: Any, args: Sequence[Any], kwargs: Mapping[str, Any], parts: Sequence[Tensor]
) -> Callable[[RankNumber], Tensor]:
    """Returns the function that takes the part of each rank."""
    keeps = func not in (torch.unbind, Tensor.unbind)
    x, *rest = [*args, *(kwargs[name] for name in ("input", "self", "tensor") if name in kwargs)]
    given = kwargs.get("dim", rest[1 if keeps else 0] if len(rest) > keeps else 0)
    dim = given % x.ndim
    sizes = {part.shape[dim] for part in parts} if keeps else {1}

    def cut(number: RankNumber) -> Tensor:
        if len(sizes) > 1:
            number.refuse("ranks take parts of different sizes.", "cut it into equal parts")
        (size,) = sizes
        if not all(-len(parts) <= value < len(parts) for value in number.values):
            raise IndexError("tuple index out of range")
        at = number if min(number.values) >= 0 else number % len(parts)
        own = part_of(host, x, dim, at, size)
        return own if keeps else own.squeeze(dim)

    return cut


def part_of(host: Host, x: Tensor, dim: int, position: RankNumber, size: int) -> Tensor:
    """Returns `size` entries from `position * size` on: as a conversion where these are shards.

    A conversion keeps them a shard for global strictness, which knows nothing of picked entries.
    """
    num_parts = len(position.values)
    is_own = position.values == tuple(range(num_parts)) and x.shape[dim] == size * num_parts
    types = host.by_axis(host.storage_type(x).types)
    if is_own and not any(types[axis].varies for axis in position.axes):
        return _converted(host, x, position.axes, dim)
    return entries(host, x, dim, position * size, size)


def _converted(host: Host, x: Tensor, axes: tuple[str, ...], dim: int) -> Tensor:
    scope = current_scope()
    assert scope is not None  # a body runs
    # Where autograd records, the gradient of a part is that of what each rank has used.
    types = host.by_axis(host.storage_type(x).types)
    several = [axis for axis in axes if host.mesh.shape[axis] > 1]  # on one device none has
    axes = tuple(several or [axis for axis in axes if types[axis] != I] or axes)
    source = I if not torch.is_grad_enabled() and any(types[axis] == I for axis in axes) else R
    with enter_scope(Scope(scope.backend, scope.axes)):  # runs make no such step
        found: Tensor = convert(x, axes, src=source, dst=V, dim=dim)
    return found


def entries(host: Host, x: Tensor, dim: int, start: Any, length: int) -> Tensor:
    """Returns the entries of each rank from `start` on."""
    return host.copies.pick(host, x, dim, as_tensor(start) + torch.arange(length, device=x.device))


def any_of(values: Sequence[Any]) -> bool:
    """Returns whether there are numbers that differ by rank among arguments."""
    return next(_numbers(values), None) is not None


def rewritten(host: Host, func: Any, args: Any, kwargs: Any) -> Any:
    """Returns the function to call in place of `func` with these arguments, which does the same."""
    if host.numbers.differ_by_rank and any_of([*args, *kwargs.values()]):
        return wraps(func)(partial(call, host, func))
    return functions.rewritten(host, func, args, kwargs)


def call(host: Host, func: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls a torch function that gets numbers which differ by rank.

    Raises:
        ShardTypeError: what it would do depends on more than types and shapes tell.
    """
    name = getattr(func, "__name__", str(func))
    taken = _TAKING.get(name)
    if taken is not None:
        return taken(host, func, *args, **kwargs)
    if str(getattr(func, "__module__", "")).startswith("torch.distributed"):
        return func(*args, **kwargs)  # which may take one for a peer
    if is_arithmetic(name):
        return func(*map(as_tensor, args), **{key: as_tensor(x) for key, x in kwargs.items()})
    next(_numbers([*args, *kwargs.values()])).refuse(
        f"{name} gets a number that differs by rank.", ""
    )


def _numbers(values: Any) -> Iterator[RankNumber]:
    for value in values:
        if type(value) is RankNumber:
            yield value
        elif isinstance(value, slice):
            yield from _numbers([value.start, value.stop, value.step])
        elif type(value) in (list, tuple):
            yield from _numbers(value)


def _getitem(host: Host, func: Any, x: Tensor, index: Any) -> Any:
    """Takes ranges one after the other, as views do; two at once would be paired."""
    parts = list(parts_of(index))
    for at, part in enumerate(parts):
        if isinstance(part, slice) and any_of([part]):
            dim = dim_of_part(x, parts, at)
            x = _range(host, x, dim, part)
            parts[at] = slice(None)
    rest = tuple(map(as_tensor, parts))
    found = read(host, x, rest)
    return x[rest] if found is NotImplemented else found


def _range(host: Host, x: Tensor, dim: int, part: slice) -> Tensor:
    (number, *_) = _numbers([part])
    start = 0 if part.start is None else part.start
    size = x.shape[dim]
    length = (size if part.stop is None else part.stop) - start
    ends = start + length if type(start) is RankNumber else part.stop
    bounds = [*_values(start), *_values(ends)]
    lengths = {*_values(length)}
    is_plain = part.step in (None, 1) and all(0 <= bound <= size for bound in bounds)
    if not is_plain or len(lengths) > 1:
        number.refuse(
            "ranks take slices of different sizes, or that reach beyond the tensor.", _AS_PART
        )
    (count,) = lengths
    position = start // count if count and type(start) is RankNumber else None
    if position is not None and [*_values(position * count)] == [*_values(start)]:
        return part_of(host, x, dim, position, count)
    return entries(host, x, dim, start, count)


def _values(number: Any) -> Sequence[Any]:
    return number.values if type(number) is RankNumber else (number,)


def _narrow(host: Host, func: Any, x: Tensor, dim: int, start: Any, length: Any) -> Tensor:
    return _range(host, x, dim % x.ndim, slice(start, start + length))


def _select(host: Host, func: Any, x: Tensor, dim: int, index: RankNumber) -> Tensor:
    return entries(host, x, dim % x.ndim, index, 1).squeeze(dim)


def _setitem(host: Host, func: Any, x: Tensor, index: Any, value: Any) -> None:
    parts = parts_of(index)
    ranged = [p for p in parts if isinstance(p, slice) and any_of([p])]
    for part in ranged:
        (number, *_) = _numbers([part])
        if part.start is None or part.stop is None or len({*_values(part.stop - part.start)}) > 1:
            number.refuse("ranks write slices of different sizes.", _AS_PART)
    where = tuple(_with_tensors(part) for part in parts)
    if write(host, x, where, as_tensor(value)) is NotImplemented:
        x[where] = as_tensor(value)


def _with_tensors(part: Any) -> Any:
    if isinstance(part, slice):
        return slice(as_tensor(part.start), as_tensor(part.stop), part.step)
    return as_tensor(part)


def _arange(host: Host, func: Any, *args: Any, **kwargs: Any) -> Tensor:
    bounds = [*args, *(kwargs.pop(name) for name in ("start", "end", "step") if name in kwargs)]
    (number, *_) = _numbers(bounds)
    if len(bounds) != 2 or len({*_values(bounds[1] - bounds[0])}) > 1:
        number.refuse(
            "ranks make ranges of different sizes.", "make torch.arange(n), and add to it"
        )
    (count,) = {*_values(bounds[1] - bounds[0])}
    found: Tensor = as_tensor(bounds[0]) + func(count, **kwargs)
    return found


def _literal(host: Host, func: Any, data: Any, **kwargs: Any) -> Tensor:
    if type(data) is not RankNumber:
        (number, *_) = _numbers([data])
        number.refuse(f"{func.__name__} gets a list with a number that differs by rank.", "")
    return data.tensor().to(**{name: x for name, x in kwargs.items() if name != "requires_grad"})


_TAKING: Final[Mapping[str, Callable[..., Any]]] = {
    "__getitem__": _getitem,
    "__setitem__": _setitem,
    "narrow": _narrow,
    "select": _select,
    "arange": _arange,
    "tensor": _literal,
    "as_tensor": _literal,
}
"""Functions that are called in place of those that take more than numbers."""

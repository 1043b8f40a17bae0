"""Repairs of a rejected program: proposed where it fails, and tried before they are printed."""

import operator
import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from types import FrameType
from typing import Any, Final, Literal, TypeAlias, TypeVar

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.source_location import Site, calling
from shardmap_torch.errors import MAX_LINES, ShardTypeError
from shardmap_torch.ops.reading import Reading
from shardmap_torch.types import AxisType, I

T = TypeVar("T")

Op = Literal["sum", "mean"]
Place = tuple[Site | None, int]
"""A user's line, and how often it has run before; the same on all paths through a body."""


NUMBER: Final = -2
"""The index of a spot from which on, downwards, it is a number."""


@dataclass(frozen=True)
class Spot:
    """A tensor that a call of a function of torch in the body gets or returns.

    Attributes:
        site: the user's line.
        at: the position of the call in the code of the line.
        name: of the function.
        index: which of the tensors it gets, each of them counted once; -1 is its result, and -2 the
            first of the Python numbers that it gets.
        run: how often it has run before; None for all runs, as in a loop.
        number: the number, in words.
        which: which call of the function it is, in words, if its line has several.
    """

    site: Site
    at: int
    name: str
    index: int = 0
    run: int | None = None
    number: str = field(default="", compare=False)
    which: str = field(default="", compare=False)

    def __str__(self) -> str:
        """Formats it as `operand 2 of matmul at model.py:12`."""
        what = "the result" if self.index < 0 else f"operand {self.index + 1}"
        what = f"the number {self.number}" if self.index <= NUMBER else what
        run = "" if self.run is None else f", run {self.run + 1} of that line"
        return f"{what} of {self.called}{run}"

    @property
    def called(self) -> str:
        """Formats the call."""
        return f"{self.name} at {self.site.place}{self.which}"


@dataclass(frozen=True)
class Insert:
    """A public function of one tensor that keeps what it means on one device.

    Attributes:
        name: of the function: a collective, or `convert`.
        axis: the mesh axes.
        options: its keyword arguments.
    """

    name: str
    axis: str | tuple[str, ...]
    options: tuple[tuple[str, Any], ...] = ()

    def of(self, x: str) -> str:
        """Writes the call.

        Example:
            >>> Insert("reduce_scatter", "tp", (("dim", 1),)).of("x")
            "reduce_scatter(x, 'tp', dim=1)"
        """
        options = "".join(f", {name}={value!r}" for name, value in self.options)
        return f"{self.name}({x}, {self.axis!r}{options})"

    def apply(self, x: Tensor) -> Tensor:
        """Calls it in a body."""
        called: Tensor = getattr(ops, self.name)(x, self.axis, **dict(self.options))
        return called


_SIGNS: Final = {"*": operator.mul, "/": operator.truediv, "//": operator.floordiv}


@dataclass(frozen=True)
class Scaling:
    """A multiplication by the number of ranks of axes, or a division, which does nothing on one.

    Attributes:
        axis: the mesh axes.
        sign: the operator.
    """

    axis: str | tuple[str, ...]
    sign: str

    def of(self, x: str) -> str:
        """Writes it.

        Example:
            >>> Scaling("dp", "/").of("x")
            "x / axis_size('dp')"
        """
        return f"{x} {self.sign} axis_size({self.axis!r})"

    def apply(self, x: Any) -> Any:
        """Does it in a body."""
        return _SIGNS[self.sign](x, ops.axis_size(self.axis))


Change: TypeAlias = Insert | Scaling
"""A function that a repair applies to a value."""


def nested(chain: Sequence[Change], x: str = "x") -> str:
    """Writes calls of which each takes the result of the one before."""
    return reduce(lambda x, insert: insert.of(x), chain, x)


def applied(chain: Sequence[Change], x: Any) -> Any:
    """Calls one after the other in a body."""
    return reduce(lambda x, insert: insert.apply(x), chain, x)


def insertion(spot: Spot, chain: Sequence[Change]) -> "Repair":
    """Makes the repair that applies functions to a tensor of a call."""
    return Repair(f"{nested(chain)} for x, {spot}", inserted={spot: tuple(chain)})


_REDUCING: Final = (ops.all_reduce.__code__, ops.reduce_scatter.__code__)


def _reducing() -> FrameType | None:
    """Returns the frame of the call of all_reduce or reduce_scatter that goes on, if one does."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _REDUCING:
        frame = frame.f_back
    return frame


def is_divided() -> bool:
    """Returns whether the collective that is issued now is one with op="mean"."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code not in _REDUCING:
        if frame.f_code is Reading.issue.__code__:
            return frame.f_locals["self"].finish is not None
        frame = frame.f_back
    return frame is not None and bool(frame.f_locals.get("made") == "mean")


def reduction() -> Spot | None:
    """Returns the spot of the body's call of all_reduce or reduce_scatter that goes on."""
    frame = _reducing()
    found = None if frame is None else calling(frame.f_back)
    return None if frame is None or found is None else Spot(*found, frame.f_code.co_name)


class Places:
    """Counts how often each line runs."""

    def __init__(self) -> None:
        self._counts: Counter[Site | None] = Counter()

    def next(self, site: Site | None) -> Place:
        """Returns the place of the current run of this line."""
        self._counts[site] += 1
        return site, self._counts[site] - 1


@dataclass(frozen=True)
class Repair:
    """A small change of a program.

    Attributes:
        text: what to write.
        collectives: for the place of a collective in the forward, its replacement, or None to
            leave it out.
        replicate: for the position of an input, an axis to name in its `replicate=`.
        exits: for the position of a result, what to apply to it before it is returned.
        values: for the place where a Python value is taken of a tensor, by which op to reduce it
            before.
        gradients: for the place where the body takes gradients, the axes over which to reduce them,
            each with "sum" or "mean".
        inserted: for a tensor that a call gets or returns, or a number, what to apply to it.
        ops: for a call of all_reduce or reduce_scatter, by its spot, the op to use.
        left_out: lines at which to leave out every collective of that name.
        parts: the repairs that it is made of, if there are several.
    """

    text: str
    collectives: Mapping[Place, Collective | None] = field(default_factory=dict)
    replicate: Mapping[int, str] = field(default_factory=dict)
    exits: Mapping[int, tuple[Insert, ...]] = field(default_factory=dict)
    values: Mapping[Place, Op] = field(default_factory=dict)
    gradients: Mapping[Place, Sequence[tuple[str, Op]]] = field(default_factory=dict)
    inserted: Mapping[Spot, tuple[Change, ...]] = field(default_factory=dict)
    ops: Mapping[Spot, Op] = field(default_factory=dict)
    left_out: frozenset[tuple[Site | None, str]] = frozenset()
    parts: "tuple[Repair, ...]" = ()

    def sum_at(self, place: Place, gradient: Tensor) -> Tensor:
        """Adds up a gradient that is taken at a place, over the axes that the repair names."""
        for axis, op in self.gradients.get(place, ()):
            gradient = ops.all_reduce(gradient, axis, dst=I, op=op)
        return gradient

    def collective_at(self, place: Place, name: str, own: T) -> Collective | T | None:
        """Returns what to call at a place where the program calls `own`, or None for nothing."""
        if (place[0], name) in self.left_out:
            return None
        return self.collectives.get(place, own)


def both(first: Repair, second: Repair) -> Repair:
    r"""Combines two repairs into one; where both change one collective, the second does.

    Example:
        >>> both(Repair("a", replicate={0: "tp"}), Repair("b", replicate={1: "tp"})).text
        'a\n  and b'
    """
    if second.parts:
        return reduce(both, second.parts, first)
    changed = second.collectives.keys()
    kept = [each for each in first.parts or (first,) if not each.collectives.keys() & changed]
    again = [part for part in kept if part.inserted.keys() & second.inserted.keys()]
    if again:  # applied to one tensor, one after the other
        ((spot, chain),) = second.inserted.items()
        second = insertion(spot, (*again[0].inserted[spot], *chain))
        kept.remove(again[0])
    parts = (*kept, second)
    return Repair(
        "\n  and ".join(part.text for part in parts),
        {place: other for part in parts for place, other in part.collectives.items()},
        {position: axis for part in parts for position, axis in part.replicate.items()},
        _joined([part.exits for part in parts]),
        {place: op for part in parts for place, op in part.values.items()},
        _joined([part.gradients for part in parts]),
        _joined([part.inserted for part in parts]),
        {spot: op for part in parts for spot, op in part.ops.items()},
        frozenset().union(*(part.left_out for part in parts)),
        parts,
    )


def _joined(parts: Sequence[Mapping[Any, Sequence[Any]]]) -> dict[Any, tuple[Any, ...]]:
    found: dict[Any, tuple[Any, ...]] = {}
    for part in parts:
        for key, values in part.items():
            found[key] = (*found.get(key, ()), *values)
    return found


NONE = Repair("")
"""A repair that changes nothing."""

LOCATING = Repair("")
"""Another one, with which calls are counted, so that an error tells where repairs may go."""


def axes_of(collective: Collective) -> str:
    """Formats the axes as the user wrote them."""
    return repr(collective.axes[0] if len(collective.axes) == 1 else collective.axes)


def propose(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """Attaches to an error the repairs that could be tried."""
    error.__dict__["_shardmap_repairs"] = tuple(repairs)
    return error


def proposed(error: ShardTypeError) -> tuple[Repair, ...]:
    """Returns the repairs attached to an error."""
    repairs: tuple[Repair, ...] = error.__dict__.get("_shardmap_repairs", ())
    return repairs


def of_equal(error: ShardTypeError, makers: Iterable[object]) -> ShardTypeError:
    """Attaches to an error the equations that made the equal values which meet what varies."""
    error.__dict__["_shardmap_equal"] = tuple(makers)
    return error


def makers_of_equal(error: ShardTypeError) -> Sequence[object]:
    """Returns the equations that `of_equal` attached."""
    makers: Sequence[object] = error.__dict__.get("_shardmap_equal", ())
    return makers


def of_types(error: ShardTypeError, types: Iterable[AxisType]) -> ShardTypeError:
    """Attaches to an error the types that its message is about."""
    error.__dict__["_shardmap_types"] = frozenset(types)
    return error


def is_about(error: ShardTypeError, axis_type: AxisType) -> bool:
    """Returns whether a type is among those that `of_types` attached."""
    return axis_type in error.__dict__.get("_shardmap_types", ())


def mark_step(error: ShardTypeError) -> None:
    """Marks an error as that of a body which takes gradients by itself."""
    error.__dict__["_shardmap_step"] = True


def is_of_step(error: ShardTypeError) -> bool:
    """Returns whether the body has taken gradients by itself before this error."""
    return "_shardmap_step" in error.__dict__


def note_reached(error: ShardTypeError, step: float) -> bool:
    """Notes how far a check came until this error; returns whether that was not known."""
    return error.__dict__.setdefault("_shardmap_reached", step) is step


def reached(error: ShardTypeError) -> float:
    """Returns how far a check came until this error; -1 if that is not known."""
    step: float = error.__dict__.get("_shardmap_reached", -1.0)
    return step


def with_tried(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """Adds to an error the repairs that passed, in the order in which they were proposed."""
    if repairs:
        lines = [f"Tried, and accepted also by check='global': {each.text}" for each in repairs]
        error.args = ("\n".join([str(error), *lines]),)
    error.__dict__["_shardmap_tried"] = tuple(repairs)
    return error


def tried(error: ShardTypeError) -> tuple[Repair, ...]:
    """Returns the repairs that the message of an error names."""
    repairs: tuple[Repair, ...] = error.__dict__.get("_shardmap_tried", ())
    return repairs


def shortened(error: ShardTypeError) -> ShardTypeError:
    """Cuts an error's message to 40 lines; `findings` keeps the complete text."""
    lines = str(error).splitlines()
    error.findings = error.findings or (str(error),)
    if len(lines) > MAX_LINES:
        left = len(lines) - MAX_LINES + 1
        error.args = ("\n".join([*lines[: MAX_LINES - 1], f"... and {left} more lines"]),)
    return error

"""Runs in which each rank has a state of its own, of what the body refers to and changes.

Ranks of a simulated mesh share one process, and so a counter that their body increments. Here all
of them find it as the check did, and their changes do not mix, as on processes; after the call it
is as the first rank has left it. Lists keep what every rank, and the check, has appended. In a
backward, in which hooks and Functions of the user's run, each finds it as it has left it itself,
or as it is then, if it was changed in between.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import Any, Final

from shardmap_torch.backends.rank import current_rank
from shardmap_torch.backends.threads import handing_over
from shardmap_torch.boundary.call import Call, Wrap
from shardmap_torch.checker.guards.places import Kept
from shardmap_torch.errors import ShardTypeError


@contextmanager
def own_state(call: Call, altered: Sequence[Kept]) -> Iterator[Call]:
    """Yields a call of the same body, each of whose runs starts from the values that are kept."""
    states = _States(call.name, altered)

    def forward(function: Callable[..., Any]) -> Callable[..., Any]:
        start = [kept.value for kept in altered]

        @wraps(function)
        def apart(*args: Any, **kwargs: Any) -> Any:
            return states.run(current_rank(), start, lambda: function(*args, **kwargs))

        return apart

    with states.joined():
        yield replace(call, function=forward(call.function), separate=states.later)


@dataclass(eq=False)
class _States:
    """The values that each rank has left in the places that a body changes.

    Attributes:
        name: the name of the body.
        altered: the places, with what they held when the body was checked.
        ends: what each rank has left, by the rank.
        left: what was left for all when the last of them had ended.
    """

    name: str
    altered: Sequence[Kept]
    ends: dict[int, list[Any]] = field(default_factory=dict)
    left: list[Any] = field(default_factory=list)

    def run(self, rank: int, start: list[Any], work: Callable[[], Any]) -> Any:
        """Does the work of a rank, which starts from some values and ends with its own."""
        own = [*start]

        def leave() -> None:
            own[:] = self._read()

        def back() -> None:
            for kept, value in zip(self.altered, own, strict=True):
                kept.place.put(value)

        back()
        with handing_over(leave, back):
            out = work()
        self.ends[rank] = self._read()
        return out

    @contextmanager
    def joined(self, starts: list[Any] | None = None) -> Iterator[None]:
        """Puts into the places, after the block, the state that the ranks have left together."""
        before = [kept.value for kept in self.altered] if starts is None else starts
        after = self._read()
        try:
            yield
        finally:
            ends = [self.ends[rank] for rank in sorted(self.ends)] or [[*before]]
            for at, kept in enumerate(self.altered):
                kept.place.put(_joined(kept, before[at], after[at], [end[at] for end in ends]))
            self.left = self._read()

    @contextmanager
    def later(self) -> Iterator[Wrap]:
        """Runs a backward of the ranks; its work has the rank as its argument."""
        now = self._read()
        pairs = zip(self.altered, now, self.left, strict=True)
        known = [kept.place.same(x, left) for kept, x, left in pairs]
        for kept, is_known in zip(self.altered, known, strict=True):
            if not is_known and self._differs(kept):
                raise ShardTypeError(_CHANGED.format(self.name))
        starts = {
            rank: [end if is_own else x for end, x, is_own in zip(ends, now, known, strict=True)]
            for rank, ends in self.ends.items()
        }

        def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
            return lambda rank: self.run(rank, starts.get(rank, now), lambda: function(rank))

        with self.joined(now):
            yield wrap

    def _differs(self, kept: Kept) -> bool:
        """Returns whether the ranks have left different things in a place."""
        at = [each is kept for each in self.altered].index(True)
        first, *others = [end[at] for end in self.ends.values()] or [None]
        return not all(kept.place.same(first, each) or _equal(first, each) for each in others)

    def _read(self) -> list[Any]:
        return [kept.place.get() for kept in self.altered]


_CHANGED: Final = (
    "{}: the body keeps what each rank has for itself in what it refers to, and a backward of it "
    "runs after another call has replaced that. Pass it as an argument, save it in the context of "
    "a Function, or close over a variable of the body itself."
)


def _equal(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    if one is other:
        return True
    if isinstance(one, dict):
        return _equal([*one], [*other]) and _equal([*one.values()], [*other.values()])
    if isinstance(one, tuple | list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return type(one) in (int, float, bool, str, bytes, complex) and bool(one == other)


def _joined(kept: Kept, before: Any, after: Any, ends: Sequence[Any]) -> Any:
    """Returns what a place holds after the runs, given what it held just before them."""
    count = len(before) if kept.place.adds else 0
    lists = [after, *ends] if kept.place.adds else []
    if not lists or any(not kept.place.same(each[:count], before) for each in lists):
        return ends[0]
    return [*after, *(item for end in ends for item in end[count:])]

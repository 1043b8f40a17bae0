"""Runs in which each rank has a state of its own, of what the body refers to and changes.

Ranks of a simulated mesh share one process, and so a counter that their body increments. Here all
of them find it as the check did, and their changes do not mix, as on processes; after the call it
is as the first rank has left it. Lists keep what every rank, and the check, has appended. In a
backward, in which hooks and Functions of the user's run, all find it as it is then.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial, wraps
from typing import Any

from shardmap_torch.backends.threads import handing_over
from shardmap_torch.boundary.call import Call, Wrap
from shardmap_torch.checker.guards.places import Kept


@contextmanager
def own_state(call: Call, altered: Sequence[Kept]) -> Iterator[Call]:
    """Yields a call of the same body, each of whose runs starts from the values that are kept."""
    with _apart(altered) as wrap:
        yield replace(call, function=wrap(call.function), separate=partial(_from_now, altered))


@contextmanager
def _from_now(altered: Sequence[Kept]) -> Iterator[Wrap]:
    with _apart([replace(kept, value=kept.place.get()) for kept in altered]) as wrap:
        yield wrap


@contextmanager
def _apart(altered: Sequence[Kept]) -> Iterator[Wrap]:
    after = _read(altered)
    ends: list[list[Any]] = []
    try:
        yield partial(_own, altered=altered, ends=ends)
    finally:
        ends = ends or [[kept.value for kept in altered]]
        for at, kept in enumerate(altered):
            kept.place.put(_joined(kept, after[at], [end[at] for end in ends]))


def _read(altered: Sequence[Kept]) -> list[Any]:
    return [kept.place.get() for kept in altered]


def _joined(kept: Kept, after: Any, ends: Sequence[Any]) -> Any:
    """Returns what a place holds after the runs, given what it held just before them."""
    count = len(kept.value) if kept.place.adds else 0
    lists = [after, *ends] if kept.place.adds else []
    if not lists or any(not kept.place.same(each[:count], kept.value) for each in lists):
        return ends[0]
    return [*after, *(item for end in ends for item in end[count:])]


def _own(
    function: Callable[..., Any], altered: Sequence[Kept], ends: list[list[Any]]
) -> Callable[..., Any]:
    @wraps(function)
    def apart(*args: Any, **kwargs: Any) -> Any:
        own: list[Any] = [kept.value for kept in altered]

        def leave() -> None:
            own[:] = _read(altered)

        def back() -> None:
            for kept, value in zip(altered, own, strict=True):
                kept.place.put(value)

        back()
        with handing_over(leave, back):
            out = function(*args, **kwargs)
        ends.append(_read(altered))
        return out

    return apart

"""Purity: rejects bodies that change what they depend on, so that each run is another program.

The checker runs a body, and then every rank does; on a simulated mesh they share the objects that
the body refers to. A list that it appends to, and does not read, is harmless. But a counter that it
multiplies by would differ between ranks, though its type says that it is equal on all. So if a
check leaves something changed, the body is checked again, and must be the same program.
"""

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import cache, cached_property
from operator import eq
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.api import program_of
from shardmap_torch.checker.guards.captured_state import Surroundings
from shardmap_torch.checker.guards.changing_objects import is_there, position_of
from shardmap_torch.checker.guards.places import Kept, Place, looking
from shardmap_torch.checker.ir.symbolic import SymbolicNumber
from shardmap_torch.checker.verify.verdict import Verdict
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import FakeTensor, FakeTensorMode
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardTypeError

_FIX: Final = (
    "Fix: pass what it depends on as an argument, and return what is new; draw random numbers from "
    "a key of shardmap_torch.random."
)
_REPAIR: Final = (
    f"Each rank runs the body, and so does the checker: they would not compute the same.\n{_FIX}"
)


def verify_purely(
    name: str, surroundings: Surroundings, verify: Callable[[], Verdict], shares: bool
) -> Verdict:
    """Returns the verdict on a body, after requiring that repeated checks find the same program.

    Leaves what the body changes as it was, apart from what it appends to lists and has a value, and
    notes it in the verdict: a run starts from there. Where ranks share a process, so is noted what
    it only changes for a while, if other ranks run meanwhile.

    Raises:
        ShardTypeError: the body changes what it refers to, and so its program.
    """
    _load()
    before = Before(surroundings)
    try:
        with looking(before.look) if shares else nullcontext():
            verdict = verify()
        changed = before.changes()
        for _ in range(_AGAIN if changed else 0):
            again = Before(surroundings)
            another = verify()
            _require_same(name, verdict, another, changed)
            verdict = another
            if not again.changes():
                break
        before.require_unmoved(name)
    finally:
        altered = before.put_back()
    return replace(verdict, altered=altered) if altered else verdict


@cache
def _load() -> None:
    """Loads what checks load, before the state is kept: Dynamo wraps functions of torch."""
    FakeTensorMode()


_AGAIN: Final = 2
"""Number of repeated checks of a body that leaves changes: a difference may appear late."""


class Before:
    """The state that a body refers to, before a check of it."""

    def __init__(self, surroundings: Surroundings) -> None:
        """Keeps the state of all that the body refers to, and of Python's random numbers."""
        surroundings.key()
        self._surroundings, self._walk = surroundings, surroundings.snapshot()
        walk = self._walk
        states = [*_generators(), *(() if walk is None else walk.states())]
        self._states = [(name, Kept(place, place.get())) for name, place in states]
        places = () if walk is None else walk.places()
        self._kept = [Kept(place, place.get()) for place in places]
        moving = () if walk is None else walk.iterators()
        self._positions = [(each, position_of(each)) for each in moving]
        self._seen: set[int] = set()

    def changes(self) -> Sequence[str]:
        """Names what has changed, and iterators, which may have."""
        states = [name for name, kept in self._states if kept.is_changed]
        return [*self._surroundings.changes(self._walk), *states]

    def look(self) -> None:
        """Notes what is changed now, though it may be as it was when the check ends."""
        if not self._holds:
            self._note([*self._kept, *self._slots])
        self._note([kept for _, kept in self._states])

    @cached_property
    def _slots(self) -> Sequence[Kept]:
        """Attributes and entries; most checks need none, and a module has thousands."""
        return [] if self._walk is None else [*self._walk.slots()]

    @property
    def _holds(self) -> bool:
        return self._walk is not None and self._walk.holds()

    def _note(self, every: Sequence[Kept]) -> None:
        self._seen.update(id(kept) for kept in every if kept.is_changed)

    @property
    def altered(self) -> tuple[Kept, ...]:
        """The places that have changed, or were seen to be."""
        slots = () if self._holds and not self._seen else self._slots
        every = (*self._kept, *slots, *(kept for _, kept in self._states))
        return tuple(kept for kept in every if kept.is_changed or id(kept) in self._seen)

    def require_unmoved(self, name: str) -> None:
        """Requires that nothing was taken from an iterator, which cannot be put back.

        Raises:
            ShardTypeError: something was.
        """
        for each, position in self._positions:
            if self._walk is not None and not is_there(each, position):
                raise ShardTypeError(
                    f"{name}: the body takes items from {self._walk.label(each)}, which checks of "
                    f"it and all ranks share, so that each would get others.\n{_FIX}"
                )

    def put_back(self) -> tuple[Kept, ...]:
        """Undoes the changes, but not what was appended to lists; returns what was altered."""
        altered = self.altered
        for kept in altered:
            items = kept.place.get() if kept.place.adds else []
            if not kept.place.adds:
                kept.place.put(kept.value)
            elif not all(map(_has_value, items)):
                kept.place.put([*filter(_has_value, items)])
        return altered


def _has_value(item: Any) -> bool:
    """Returns whether an item holds none of the tensors and numbers without values of a check."""
    leaves = flatten(item)[0]
    tensors = (base_of(leaf) for leaf in leaves if isinstance(leaf, Tensor))
    is_fake = any(isinstance(tensor, FakeTensor) for tensor in tensors)
    return not is_fake and all(type(leaf) is not SymbolicNumber for leaf in leaves)


def _require_same(name: str, first: Verdict, second: Verdict, changed: Sequence[str]) -> None:
    one, two = (str(program_of(verdict)).splitlines()[1:] for verdict in (first, second))
    if one == two:
        return
    differing = next(((a, b) for a, b in zip(one, two, strict=False) if a != b), None)
    a, b = differing or (f"{len(one)} lines of program", f"{len(two)} lines of program")
    raise ShardTypeError(
        f"{name}: the body changes {', '.join(sorted(set(changed)))}, and does something else when "
        f"it runs again:\n  first: {a.strip()}\n  then: {b.strip()}\n{_REPAIR}"
    )


def _generators() -> Iterator[tuple[str, Place]]:
    """Yields generators of the process that a body may draw from unnoticed.

    Not torch's: draws from it are interpreted, and seeded in each run.
    """
    yield "the state of Python's random module", Place(random.getstate, random.setstate, eq)
    numpy = sys.modules.get("numpy")
    if numpy is not None:

        def get() -> tuple[Any, ...]:
            kind, keys, *rest = numpy.random.get_state()
            return kind, keys.tobytes(), *rest

        def put(state: tuple[Any, ...]) -> None:
            kind, keys, *rest = state
            numpy.random.set_state((kind, numpy.frombuffer(keys, numpy.uint32), *rest))

        yield "the state of numpy.random", Place(get, put, eq)

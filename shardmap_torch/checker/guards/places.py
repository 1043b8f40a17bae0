"""Places: what a body refers to and may change, which can be read, kept and put back.

With them a check leaves no lasting change of numbers, and ranks that share a process have each a
state of their own, as processes have.
"""

import io
import os
import random
import sys
import threading
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from operator import eq, is_
from typing import Any, Final

from shardmap_torch.checker.guards.changing_objects import NUMPY_RANDOM, content_of

ABSENT: Final = object()
"""Stands for the value of an attribute that an object lacks."""
CONTAINERS: Final = (list, dict, set, deque)
"""Types of the containers that are put back as a whole."""


@dataclass(frozen=True)
class Place:
    """Something that holds a value.

    Attributes:
        get: reads it, as a copy of what can be changed in place.
        put: makes it hold a value that `get` returned.
        same: compares two such values.
        adds: whether it is a list: what checks and ranks append to it is kept.
    """

    get: Callable[[], Any]
    put: Callable[[Any], None]
    same: Callable[[Any, Any], bool] = is_
    adds: bool = False


@dataclass(frozen=True)
class Kept:
    """A place, and what it held before."""

    place: Place
    value: Any

    @property
    def is_changed(self) -> bool:
        """True if it holds something else now, or another object."""
        return not self.place.same(self.place.get(), self.value)


def _same_items(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(map(is_, one, other))


def _same_entries(one: dict[Any, Any], other: dict[Any, Any]) -> bool:
    return list(one) == list(other) and all(map(is_, one.values(), other.values()))


def slot(owner: Any, name: Any, is_attribute: bool) -> Place:
    """Returns the place of an attribute, of a class its own ones, or of an entry of a dict.

    Example:
        >>> table = {"count": 1}
        >>> place = slot(table, "count", False)
        >>> place.put(place.get() + 1), table
        (None, {'count': 2})
    """
    if isinstance(owner, type):
        return Place(lambda: vars(owner).get(name, ABSENT), lambda x: _set(owner, name, x))
    if is_attribute:
        return Place(lambda: getattr(owner, name, ABSENT), lambda x: _set(owner, name, x))
    return Place(lambda: owner.get(name, ABSENT), lambda x: _set_entry(owner, name, x))


def _set(owner: Any, name: str, value: Any) -> None:
    if value is not ABSENT:
        setattr(owner, name, value)
    elif hasattr(owner, name):
        delattr(owner, name)


def _set_entry(owner: dict[Any, Any], name: Any, value: Any) -> None:
    if value is not ABSENT:
        owner[name] = value
    else:
        owner.pop(name, None)


def container(owner: Any) -> Place:
    """Returns the place of all that a list, dict, set, deque or array of objects contains."""
    if isinstance(owner, dict):
        return Place(lambda: dict(owner), lambda x: _fill(owner, owner.update, x), _same_entries)
    put = owner.update if isinstance(owner, set) else owner.extend
    adds = isinstance(owner, list)
    return Place(lambda: list(owner), lambda x: _fill(owner, put, x), _same_items, adds)


def _fill(owner: Any, put: Callable[[Any], None], items: Any) -> None:
    owner.clear()
    put(items)


def variable(owner: "ContextVar[Any]") -> Place:
    """Returns the place of a context variable."""

    def put(value: Any) -> None:
        if value is not ABSENT:
            owner.set(value)

    return Place(lambda: owner.get(ABSENT), put)


def buffer(owner: Any) -> Place:
    """Returns the place of the bytes of an array, of 64 MiB at most."""
    return Place(lambda: content_of(owner), lambda x: _write(owner, x), eq)


def _write(owner: Any, value: bytes) -> None:
    if not value:
        return
    if hasattr(owner, "dtype"):  # of numpy, where it may have any strides
        numpy = sys.modules["numpy"]
        owner[...] = numpy.frombuffer(value, owner.dtype).reshape(owner.shape)
    elif memoryview(owner).nbytes == len(value):
        memoryview(owner).cast("B")[:] = value
    else:
        del owner[:]
        owner.extend(value) if isinstance(owner, bytearray) else owner.frombytes(value)


def state(owner: Any) -> Place | None:
    """Returns the place of the state of a generator of random numbers, or a file in memory."""
    if type(owner) in (io.BytesIO, io.StringIO) and not owner.closed:
        return Place(owner.__getstate__, owner.__setstate__, eq)
    if isinstance(owner, random.Random) and not isinstance(owner, random.SystemRandom):
        return Place(owner.getstate, owner.setstate, eq)
    if type(owner).__module__ not in NUMPY_RANDOM:
        return None
    bits = getattr(owner, "bit_generator", None) or owner._bit_generator
    return Place(lambda: bits.state, lambda x: setattr(bits, "state", x), _same_text)


def _same_text(one: Any, other: Any) -> bool:
    return repr(one) == repr(other)  # there are arrays in them


def environment() -> Place:
    """Returns the place of the variables of the process."""
    return Place(lambda: dict(os.environ), lambda x: _fill(os.environ, os.environ.update, x), eq)


class _Looks(threading.local):
    def __init__(self) -> None:
        self.stack: list[Callable[[], None]] = []


_LOOKS: Final = _Looks()


@contextmanager
def looking(look: Callable[[], None]) -> Iterator[None]:
    """Calls `look` wherever a body that is checked in the block meets other ranks."""
    _LOOKS.stack.append(look)
    try:
        yield
    finally:
        _LOOKS.stack.pop()


def look() -> None:
    """Looks at the places, where ranks that share a process let others run."""
    for each in _LOOKS.stack:
        each()

"""Objects of libraries that change: arrays of numbers, generators of numbers, clocks.

Arrays are compared by their content. Of the others only repeated checks can tell whether the
program depends on them.
"""

import array
import contextvars
import datetime
import gc
import io
import itertools
import operator
import os
import queue
import secrets
import sys
import threading
import time
import types
import uuid
from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

_MOST: Final = 1 << 26
"""Maximal number of bytes of an array that each call compares, at some 5 GB/s."""

DICT_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))

_CLOCKS: Final[Mapping[str, tuple[types.ModuleType, tuple[str, ...]]]] = {
    "time": (
        time,
        tuple(
            f"{clock}{unit}"
            for clock in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
            for unit in ("", "_ns")
        ),
    ),
    "uuid": (uuid, ("uuid1", "uuid4")),
    "secrets": (secrets, ("randbelow", "randbits", "token_bytes", "token_hex", "choice")),
    "os": (os, ("urandom", "times")),
    "datetime": (datetime, ("datetime", "date")),
}
CHANGING_MODULES: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {each: getattr(module, each) for each in names}
    for name, (module, names) in _CLOCKS.items()
}
"""Of modules of the standard library the functions and classes that give a value of their own."""
_CHANGING: Final = frozenset(
    id(value) for table in CHANGING_MODULES.values() for value in table.values()
)


def is_array(value: Any) -> bool:
    """Returns whether an object is an array, whose content is compared."""
    return isinstance(value, bytearray | array.array) or _is_numpy(value)


def _is_numpy(value: Any) -> bool:
    numpy: Any = sys.modules.get("numpy")  # it need not be there
    return numpy is not None and isinstance(value, numpy.ndarray)


def content_of(value: Any) -> bytes:
    """Returns the content of an array; nothing for one of more than 64 MiB, or of objects."""
    if _is_numpy(value):
        is_kept = not has_objects(value) and value.nbytes <= _MOST
        return sys.modules["numpy"].ndarray.tobytes(value) if is_kept else b""
    return bytes(value) if memoryview(value).nbytes <= _MOST else b""


def state_of(value: Any) -> tuple[str, bytes]:
    """Returns all that is compared of an array: its form, and its content."""
    form = (getattr(value, name, None) for name in ("shape", "dtype", "strides", "typecode"))
    writeable = getattr(getattr(value, "flags", None), "writeable", None)
    return f"{*form, writeable}", content_of(value)


def has_objects(value: Any) -> bool:
    """Returns whether an array holds objects, whose state its bytes do not show."""
    return hasattr(value, "dtype") and bool(value.dtype.hasobject)


class Objects(Collection[Any]):
    """The objects in an array, as a container of them."""

    def __init__(self, array: Any) -> None:
        """Keeps the array; nothing is copied."""
        self._array = array

    def __len__(self) -> int:
        return int(self._array.size)

    def __contains__(self, item: object) -> bool:
        return any(each is item for each in self)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._array.ravel().tolist())

    def clear(self) -> None:
        """Does nothing: an array keeps its size."""

    def extend(self, items: list[Any]) -> None:
        """Puts other objects into it."""
        for place, item in enumerate(items):
            self._array.flat[place] = item


def gives_other_values(value: Any) -> bool:
    """Returns whether an object may give another value whenever it is asked."""
    is_iterator = hasattr(type(value), "__next__") and not isinstance(value, _IN_MEMORY)
    return is_iterator or id(value) in _CHANGING or isinstance(value, _UNREAD)


_UNREAD: Final = (
    *(queue.SimpleQueue, contextvars.Context),
    *(type(threading.Lock()), type(threading.RLock())),
    *(threading.Condition, threading.Semaphore, threading.Event, threading.Barrier),
)
"""Types whose objects have a state that cannot be read, or not put back."""


def position_of(iterator: Any) -> tuple[Any, ...]:
    """Returns what tells how far an iterator has come; equal parts if nothing was taken from it.

    These are its inner iterators, containers and numbers, since few say how much they have left. A
    file that is written has no position here: it may be a log.

    Example:
        >>> numbers = iter([1, 2])
        >>> before = position_of(numbers)
        >>> next(numbers), is_there(numbers, before)
        (1, False)
    """
    found: list[Any] = []
    seen: dict[int, Any] = {}
    pending = [iterator]
    while pending and len(seen) < _PARTS:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen[id(value)] = value
        if hasattr(value, "__next__") and hasattr(value, "writable"):
            found.append(_place_in(value))
        elif hasattr(value, "__next__"):
            frame = getattr(value, "gi_frame", None)
            found += [_left(value), frame and frame.f_lasti, *gc.get_referents(value)]
            pending += gc.get_referents(value)
        elif type(value) in (tuple, list, dict):
            found += gc.get_referents(value)
            pending += gc.get_referents(value)
    return tuple(found)


_PARTS: Final = 1000
"""Maximal number of objects that are looked at for the position of an iterator."""


def is_there(iterator: Any, position: tuple[Any, ...]) -> bool:
    """Returns whether an iterator still has a position that it had before."""
    now = position_of(iterator)
    return len(now) == len(position) and all(map(_same, now, position))


def _same(one: Any, other: Any) -> bool:
    return one is other or (type(one) in (int, str) and type(other) is type(one) and one == other)


def _left(iterator: Any) -> str:
    """Describes how much is left in an iterator over a container, or the value of a count."""
    shown = repr(iterator) if type(iterator) in (itertools.count, itertools.repeat) else ""
    try:
        return f"{operator.length_hint(iterator, -1)} {shown}"
    except Exception:  # of a user's class
        return shown


def _place_in(file: Any) -> str:
    try:
        return "" if file.writable() else f"{file.tell()}"
    except (OSError, ValueError) as error:  # closed, or read line by line
        return str(error)


_IN_MEMORY: Final = (io.BytesIO, io.StringIO)  # their state can be put back
NUMPY_RANDOM: Final = ("numpy.random._generator", "numpy.random.mtrand")

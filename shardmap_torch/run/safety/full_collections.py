"""Postpones full collections of Python's garbage collector while a body is checked.

A check makes objects by the hundred thousand that live until its end. Each time their number has
grown by a quarter the collector goes through all objects of the process, in which a tenth of the
check's time is spent, or more in a large process, and nothing is found. Young objects are collected
as ever.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

_NEVER: Final = 1 << 30
"""Number of younger collections before a full one: none during a check."""


class _Postponed:
    """The contexts that are open, on any thread, and the threshold from before the first."""

    def __init__(self) -> None:
        self._lock, self._num_open, self._before = Lock(), 0, 0

    def begin(self) -> None:
        with self._lock:
            self._num_open += 1
            if self._num_open == 1:
                first, second, self._before = gc.get_threshold()
                gc.set_threshold(first, second, _NEVER)

    def end(self) -> None:
        with self._lock:
            self._num_open -= 1
            first, second, third = gc.get_threshold()
            if self._num_open == 0 and third == _NEVER:  # else other code has set it
                gc.set_threshold(first, second, self._before)


_POSTPONED: Final = _Postponed()


@contextmanager
def postponing_full_collections() -> Iterator[None]:
    """Postpones full collections in this context, on all threads of the process.

    Example:
        >>> with postponing_full_collections():
        ...     gc.get_threshold()[2] > 1_000_000
        True
    """
    _POSTPONED.begin()
    try:
        yield
    finally:
        _POSTPONED.end()

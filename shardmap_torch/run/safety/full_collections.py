"""Postpones full collections of Python's garbage collector, and most others, during a check.

A check makes objects by the hundred thousand that live until its end, when their reference counts
free them. The collector, which looks for what these do not free, finds next to nothing, and goes
through all objects of the process again and again: a sixth of the time of checks that follow each
other was spent in that.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Lock
from typing import Final

_YOUNG: Final = 500_000
"""Number of new objects before a collection of these; what a body leaves in cycles is bounded."""

_NEVER: Final = 1 << 30
"""Number of younger collections before a full one: none during a check."""


_LOCK: Final = Lock()
_BEFORE: Final[list[tuple[int, int, int]]] = []
"""The thresholds from before the contexts that are open, on any thread; the first counts."""


@contextmanager
def postponing_full_collections() -> Iterator[None]:
    """Postpones full collections in this context, on all threads of the process.

    Example:
        >>> with postponing_full_collections():
        ...     gc.get_threshold()[2] > 1_000_000
        True
    """
    with _LOCK:
        first, second, _ = before = gc.get_threshold()
        _BEFORE.append(before)
        gc.set_threshold(max(first, _YOUNG) if first else 0, second, _NEVER)
    try:
        yield
    finally:
        with _LOCK:
            before = _BEFORE.pop()
            if not _BEFORE and gc.get_threshold()[2] == _NEVER:  # else other code has set it
                gc.set_threshold(*before)

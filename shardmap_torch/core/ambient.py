"""Ambient state of bodies: the scopes of this thread, see `collectives.scope`, and what they print.

It stands here because meshes, which know no collectives, ask it for the rank of a body.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, Final, Generic, TextIO, TypeVar, cast

T = TypeVar("T")


class ThreadStack(threading.local, Generic[T]):
    """Values for the code that a thread runs, the innermost last."""

    def __init__(self) -> None:
        self.items: list[T] = []

    @property
    def top(self) -> T | None:
        """The innermost value, or None."""
        return self.items[-1] if self.items else None

    @contextmanager
    def holding(self, item: T) -> Iterator[T]:
        """Adds a value for the code in this context."""
        self.items.append(item)
        try:
            yield item
        finally:
            self.items.pop()


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.backward: Any = None


SILENT: Final[ContextVar[bool]] = ContextVar("silent", default=False)
"""True while bodies run for the library's own sake, so that they should not print."""


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """Gives a variable a value in this context."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


silently: Final = partial(setting, SILENT, True)
"""Runs bodies for the library's own sake."""


_PRINTED: Final[ContextVar[bool | None]] = ContextVar("printed", default=None)
"""True where a body has printed in a check, which runs it several times; None outside of one."""


class _Once:
    """A stream that drops what one thread writes, if that has been printed before."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._thread = stream, threading.get_ident()
        self._is_silent, self._has_printed = SILENT.get() or _PRINTED.get(), False

    def write(self, text: str) -> int:
        """Writes what other threads do, and this one for the first time."""
        if threading.get_ident() == self._thread:
            self._has_printed = True
            if self._is_silent:
                return len(text)
        return int(self._stream.write(text))

    def end(self) -> None:
        """Lets this thread write, where another still has this stream."""
        self._thread = 0
        if self._has_printed and not SILENT.get() and _PRINTED.get() is not None:
            _PRINTED.set(True)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


printing_once: Final = partial(setting, _PRINTED, False)
"""Runs bodies by `printing_first`, of which the first that prints does so."""


@contextmanager
def printing_first() -> Iterator[None]:
    """Runs a body without data, which prints only if none has before."""
    stream, once = sys.stdout, _Once(sys.stdout)
    sys.stdout = cast(TextIO, once)
    try:
        yield
    finally:
        sys.stdout = stream
        once.end()


SCOPES: Final = _Scopes()
"""The scopes of this thread, the innermost last; None is that of code outside of any body.

`backward` is that of the body whose backward runs, where no code in it has a scope of its own.
"""

"""Ambient state of bodies: the scopes of this thread; see `collectives.scope`.

It stands here because meshes, which know no collectives, ask it for the rank of a body.
"""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Final


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Any] = []
        self.backward: Any = None


SILENT: Final[ContextVar[bool]] = ContextVar("silent", default=False)
"""True while bodies run for the library's own sake, so that they should not print."""


@contextmanager
def silently() -> Iterator[None]:
    """Runs bodies for the library's own sake."""
    token = SILENT.set(True)
    try:
        yield
    finally:
        SILENT.reset(token)


SCOPES: Final = _Scopes()
"""The scopes of this thread, the innermost last; None is that of code outside of any body.

`backward` is that of the body whose backward runs, where no code in it has a scope of its own.
"""

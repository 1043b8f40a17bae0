"""Refuses reads of the state of torch's default generator in a body.

`torch.initial_seed()` and `torch.get_rng_state()` return each process's own seed, which may differ
between processes, as a Python value that would be typed as equal on all ranks.
"""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Final

import torch

from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.errors import ShardTypeError

_ASKS: Final = {"initial_seed": "initial_seed", "get_state": "get_rng_state", "seed": "seed"}
"""Methods of a generator, and the functions of torch that call them."""

_TORCH: Final = str(Path(torch.__file__).parent)
_MODULE: Final[Any] = torch.random
_LOCK: Final = threading.Lock()


class _Names(threading.local):
    """The names of the bodies that this thread interprets."""

    def __init__(self) -> None:
        self.stack: list[str] = []


_NAMES: Final = _Names()


class _Guarded:
    """Replaces the generator in the module `torch.random` while bodies are interpreted."""

    def __init__(self, generator: torch.Generator) -> None:
        self.generator, self.users = generator, 0

    def __getattr__(self, name: str) -> Any:
        if name in _ASKS and _NAMES.stack and is_user(sys._getframe(1).f_back):
            raise ShardTypeError(
                f"{_NAMES.stack[-1]}: torch.{_ASKS[name]}() at {call_site()} gives what each "
                "process has of its own, and it would count as equal on all ranks.\n"
                "Fix: pass it as an argument, or draw from a key of shardmap_torch.random."
            )
        return getattr(self.generator, name)


def is_user(frame: FrameType | None) -> bool:
    """Returns whether the frame runs the user's own code, and not torch's or ours."""
    return frame is not None and not (is_own(frame) or frame.f_code.co_filename.startswith(_TORCH))


@contextmanager
def guarding_generator_state(name: str) -> Iterator[None]:
    """Refuses reads of the default generator's state by this thread's code in this context.

    Raises:
        ShardTypeError: it reads it; `name` is that of the body in errors.
    """
    with _LOCK:
        guard = _MODULE.default_generator
        if not isinstance(guard, _Guarded):
            guard = _MODULE.default_generator = _Guarded(guard)
        guard.users += 1
    _NAMES.stack.append(name)
    try:
        yield
    finally:
        _NAMES.stack.pop()
        with _LOCK:
            guard.users -= 1
            if guard.users == 0:
                _MODULE.default_generator = guard.generator

"""Autocast: its state, carried to code that runs elsewhere, and what must not be cast by it."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import TypeAlias

import torch

State: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""Device types, with whether autocast is enabled there, and its dtype."""


def autocast_state() -> State:
    """Returns the state of this thread."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return tuple(states)


@contextmanager
def with_autocast(state: State) -> Iterator[None]:
    """Restores a state in this context."""
    with ExitStack() as stack:
        for kind, enabled, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leaves dtypes alone: autocast promotes what `cat` and `stack` get, and refuses float16.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
        ...     torch.stack([torch.ones(2, dtype=torch.float16)]).dtype
        torch.float16
    """
    if not torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", enabled=False):
        yield

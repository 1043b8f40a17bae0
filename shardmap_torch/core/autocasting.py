"""Autocast, and what must not be cast by it."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch


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

"""Checks of programs that are differentiated from outside."""

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from shardmap_torch.checker.verify import verdict


@contextmanager
def differentiable() -> Iterator[None]:
    """Refuses a program that is right only as a step whose results nobody differentiates."""
    with patch.object(verdict, "_as_step", lambda call, strictness: None):
        yield

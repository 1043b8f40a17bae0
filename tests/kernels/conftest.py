"""Fixtures for tests that change the kernels."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from shardmap_torch.checker import hold
from shardmap_torch.memo import Memo


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Has everything held anew, where a test has changed the kernels."""
    with mock.patch.object(hold, "_HELD", Memo[Any]()):
        yield lambda: setattr(hold, "_HELD", Memo[Any]())

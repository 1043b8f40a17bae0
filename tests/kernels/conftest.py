"""Fixtures for tests that change the kernels."""

from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest

from shardmap_torch.checker.communication import equivalence
from shardmap_torch.core.caching import Memo


@pytest.fixture
def forget() -> Iterator[Callable[[], None]]:
    """Has everything held again, where a test has changed the kernels."""
    with mock.patch.object(equivalence, "_COMPARED", Memo[Any]()):
        yield lambda: setattr(equivalence, "_COMPARED", Memo[Any]())

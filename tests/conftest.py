"""Fixtures shared by all tests."""

from collections.abc import Callable, Iterator

import pytest

from tests.pool import Pool


@pytest.fixture(scope="session")
def gloo() -> Iterator[Callable[[int], Pool]]:
    """`gloo(n)` is the session's pool of `n` gloo processes, started when first used."""
    pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield pool
    for started in pools.values():
        started.close()

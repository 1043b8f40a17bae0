"""Fixtures and settings shared by all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import hypothesis
import pytest
import torch

from tests.support.fuzzing import FUZZ
from tests.support.pool import Gloo, Pool

# No deadline: on a busy machine it measures the neighbours, and pytest-timeout catches a hang.
hypothesis.settings.register_profile("tests", deadline=None, print_blob=True)
hypothesis.settings.load_profile("tests")


# Folders whose tests run programs from end to end.
PROGRAMS: Final = "checker/end_to_end examples faults nn parallel programs saving".split()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks tests that need several processes, or run programs, slow; skips what lacks a device."""
    folders = tuple(Path(__file__).parent / name for name in PROGRAMS)
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "faults": None if "SHARDMAP_FAULTS" in os.environ else "run by `make faults`",
        "fuzz": None if FUZZ else "run by `make fuzz`",
    }
    for item in items:
        if "gloo" in getattr(item, "fixturenames", ()) or not set(folders).isdisjoint(
            item.path.parents
        ):
            item.add_marker(pytest.mark.slow)
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gloo() -> Iterator[Gloo]:
    """`gloo(n)` is the session's pool of `n` gloo processes, started when first used."""
    pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield pool
    for started in pools.values():
        started.close()

"""Fixtures and settings shared by all tests."""

import gc
import os
from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Final
from unittest import mock

import hypothesis
import pytest
import torch

from shardmap_torch.checker.verify import repairing
from tests.support.fuzzing import FUZZ, left_out, sized
from tests.support.pool import Gloo, Pool

# No deadline: on a busy machine it measures the neighbours, and pytest-timeout catches a hang.
hypothesis.settings.register_profile(
    "tests", deadline=None, print_blob=True, max_examples=sized(20, 100)
)
hypothesis.settings.load_profile("tests")


_TRIES: Final = repairing._TRIES

os.environ["SHARDMAP_PROGRESS"] = "0"  # a slow machine would add lines to what tests capture

# Folders whose tests run programs from end to end, and modules that try each row of a table.
SLOW: Final = {
    Path(__file__).parent / name
    for name in (
        *("checker/end_to_end", "checker/spmd", "examples", "faults", "nn", "parallel", "programs"),
        *("run/trials", "saving", "test_readme.py"),
        *("checker/rules/test_rules.py", "collectives/test_table.py", "kernels/test_lanes.py"),
        *("kernels/test_engine.py", "kernels/test_planner.py", "test_lax.py"),
        *("checker/test_sizes.py", "checker/verify/test_repairs.py"),
        *("ops/test_reduce.py", "ops/test_reshard.py", "run/test_vmap_compiled.py"),
        *("run/test_compiled.py", "run/recorded/test_replays.py", "test_doctests.py"),
    )
}


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves slow modules unread where no slow test runs: some import half of torch's tests."""
    skips = config.option.markexpr == "not slow" and collection_path in SLOW
    return True if skips else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Marks tests that need several processes, or many runs, slow; skips what lacks a device.

    Leaves out what only `make fuzz` runs: a third of all cases.
    """
    missing = {
        "gpu": None if torch.cuda.is_available() else "needs a CUDA device",
        "faults": None if "SHARDMAP_FAULTS" in os.environ else "run by `make faults`",
    }
    if not FUZZ and not any("[" in name for name in config.args):  # no case is asked for by name
        full = {item for item in items if item.get_closest_marker("fuzz")} | left_out(items)
        config.hook.pytest_deselected(items=list(full))
        items[:] = [item for item in items if item not in full]
    for item in items:
        needs_processes = "gloo" in getattr(item, "fixturenames", ())
        if needs_processes or not SLOW.isdisjoint((item.path, *item.path.parents)):
            item.add_marker(pytest.mark.slow)
        for name, reason in missing.items():
            if reason and item.get_closest_marker(name):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Keeps torch and the tests themselves out of garbage collections: a sixth of all time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()
        gc.freeze()


@pytest.fixture(scope="session", autouse=True)
def no_repairs() -> Iterator[None]:
    """Tries no repairs of rejected programs: each costs as much as the check."""
    with mock.patch.object(repairing, "_TRIES", 0):
        yield


@pytest.fixture(autouse=True)
def alike() -> None:
    """Draws the same numbers in each order of tests: golden texts have some."""
    torch.manual_seed(0)


@pytest.fixture
def repairs() -> Iterator[None]:
    """Tries as many as outside of tests."""
    with mock.patch.object(repairing, "_TRIES", _TRIES):
        yield


@pytest.fixture(scope="session")
def gloo() -> Iterator[Gloo]:
    """`gloo(n)` is the session's pool of `n` gloo processes, started when first used."""
    pools: dict[int, Pool] = {}

    def pool(size: int) -> Pool:
        return pools.setdefault(size, Pool(size))

    yield pool
    for started in pools.values():
        started.close()

"""Calls, signatures and meshes leave nothing behind that grows."""

from itertools import pairwise
from typing import Any

import pytest
from torch._subclasses.fake_tensor import FakeTensorMode

from shardmap_torch import make_mesh
from tests.faults.support import growth
from tests.faults.support.growth import Sample
from tests.faults.support.world import World
from tests.support.fuzzing import sampled, sized


def require_flat(samples: list[Sample], objects: float, mebibytes: float) -> None:
    """Between the first and the last: at most so many objects each, and so much memory in all."""
    first, last = samples[0], samples[-1]
    shown = "\n".join(map(str, samples))
    assert last.objects - first.objects <= objects * (last.after - first.after), shown
    assert last.tensors - first.tensors <= 5, shown
    assert last.resident - first.resident <= mebibytes * 2**20, shown


def simulated(rank: int) -> dict[str, list[Sample]]:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    return {"calls": growth.calls(mesh, 60, samples=2)}


def test_calls_on_a_simulated_mesh_leave_no_objects() -> None:
    found = measured(simulated, ranks=1, seconds=300)
    require_flat(found["calls"], objects=0.1, mebibytes=20)


@pytest.mark.fuzz
def test_torch_remembers_nothing_of_checks() -> None:
    before = len(FakeTensorMode.cache)
    growth.signatures(make_mesh((2,), ("tp",), kind="simulated"), 4, samples=2)
    assert len(FakeTensorMode.cache) == before


STRICTNESSES = pytest.mark.parametrize("strictness", sampled([True, "global"], "global"))


@STRICTNESSES
def test_checks_of_dropped_functions_leave_no_objects(strictness: Any) -> None:
    first, *_, last = growth.dropped(strictness, 6)
    assert last.objects - first.objects < 10 * (last.after - first.after), (first, last)


@STRICTNESSES
def test_refused_checks_leave_no_objects(strictness: Any) -> None:
    first, last = growth.refused(strictness, 6)
    assert last.objects - first.objects < 10 * (last.after - first.after), (first, last)


def some(rank: int) -> dict[str, list[Sample]]:
    mesh = make_mesh((2,), ("tp",), kind="process_group")
    return {
        "calls": growth.calls(mesh, sized(600, 800), samples=2),  # the recorder holds 256
        "meshes": growth.meshes("process_group", (1, 2), *sized((8, 2), (24, 3))),
        "unclosed": growth.meshes("process_group", (1, 2), *sized((9, 3), (30, 5)), closes=False),
    }


def measured(function: Any, *args: Any, ranks: int = 2, seconds: float) -> dict[str, list[Sample]]:
    """Samples of new processes: those of tests hold objects of other threads and tests."""
    world = World(ranks, timeout=60)
    try:
        world.start(function, *args)
        outcome, *_ = world.outcomes(seconds)
    finally:
        world.close()
    assert outcome.value is not None, str(outcome)
    found: dict[str, list[Sample]] = outcome.value
    return found


@pytest.mark.faults
def test_calls_and_meshes_of_processes_leave_nothing_closed_or_not() -> None:
    found = measured(some, seconds=300)
    require_flat(found["calls"], objects=0.1, mebibytes=20)
    for name in ("meshes", "unclosed"):
        require_flat(found[name], objects=30, mebibytes=20)  # torch keeps some strings a group
        assert found[name][-1].threads == found[name][0].threads


@pytest.mark.faults
def test_20_000_calls_2_000_signatures_and_200_meshes_leave_nothing() -> None:
    found = measured(growth.all_of, (20_000, 2_000, 200), seconds=3400)
    require_flat(found["calls"], objects=0.01, mebibytes=10)
    evicting = [each for each in found["signatures"] if each.after > 1024]
    require_flat(
        evicting, objects=40, mebibytes=10
    )  # torch's memory of shapes, until that is trimmed
    assert evicting[-1].objects <= 1.1 * found["signatures"][3].objects
    assert all(a.objects < b.objects for a, b in pairwise(found["signatures"][:4]))  # until then
    for name in ("meshes", "unclosed meshes"):
        require_flat(found[name][1:], objects=30, mebibytes=10)

"""A rank that does something else gives every rank an error in time, and no wrong number."""

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Any

import pytest
import torch

from shardmap_torch import (
    CollectiveMismatchError,
    CommunicationError,
    MeshError,
    SpecError,
    make_mesh,
)
from tests.faults.support.cases import CASES, Kit, X
from tests.faults.support.variants import CHANGES, Programs, name_of, run_variant
from tests.faults.support.world import World

Shape = tuple[tuple[int, ...], tuple[str, ...]]
Told = tuple[str, str, float]

LINE: Shape = ((4,), ("tp",))
GRID: Shape = ((2, 2), ("dp", "tp"))
DEADLINE = 20.0
OURS = {
    error.__name__ for error in (CollectiveMismatchError, CommunicationError, MeshError, SpecError)
}
OWN = {  # what the odd rank raises by itself
    "error in a body": "ValueError",
    "error before a first use": "ValueError",
    "error between collectives": "ValueError",
    "returns early": "RuntimeError",
}
QUICK = [
    *("other order", "a copy of a shard differs", "left out", "unchecked other operator"),
    *("rejected on one", "other mesh", "unchecked other size", "placing of a stale copy"),
    *("saving of one number of many", "a result of an earlier call", "error before a first use"),
]


def run_cases(rank: int, shape: Shape, names: Sequence[str], odd: int) -> dict[str, Told]:
    """Returns how each case ended on this rank; after each all ranks go on with new groups."""
    mesh = make_mesh(*shape, timeout=DEADLINE)
    told: dict[str, Told] = {}
    for name in names:
        kit = Kit(mesh, rank == odd)
        began = time.monotonic()
        try:
            CASES[name](kit)
            told[name] = "returned", "", time.monotonic() - began
        except Exception as error:
            told[name] = type(error).__name__, str(error), time.monotonic() - began
        mesh.recover()
        for x in (X, kit.unused):
            assert torch.equal(kit.sum(x), X.sum(0))  # the mesh works again
    return told


def check(shape: Shape, names: Sequence[str], odd: int, seconds: float) -> None:
    with closing(World(4, DEADLINE)) as made:
        made.start(run_cases, shape, names, odd)
        outcomes = made.outcomes(seconds)
    assert [outcome.end for outcome in outcomes] == ["returned"] * 4, "\n".join(map(str, outcomes))
    problems = []
    for name in names:
        for rank, outcome in enumerate(outcomes):
            found: Told = outcome.value[name]
            if not is_right(name, rank == odd, found):
                problems.append((name, rank, found))
    assert not problems, "\n".join(map(str, problems))
    print({name: max(round(outcome.value[name][2], 1) for outcome in outcomes) for name in names})


def is_right(name: str, odd: bool, told: Told) -> bool:
    kind, text, seconds = told
    if odd and name in OWN:
        return kind == OWN[name]
    known = kind in OURS and "rank" in text and ".py:" in text
    return known and seconds < DEADLINE + 5


@pytest.mark.fuzz  # 14 s; `make faults` runs all
def test_some_divergences_are_errors_on_every_rank_of_a_grid() -> None:
    check(GRID, QUICK, odd=1, seconds=200)


@pytest.mark.faults
@pytest.mark.parametrize(("shape", "odd"), [(LINE, 1), (GRID, 2), (GRID, 0)], ids=str)
def test_every_divergence_is_an_error_on_every_rank(shape: Shape, odd: int) -> None:
    # One axis has one order.
    check(shape, [n for n in CASES if shape != LINE or n != "other axis order"], odd, seconds=1500)


def debugged(rank: int) -> Any:
    mesh = make_mesh((2,), ("tp",), timeout=DEADLINE, debug="collectives")
    kit = Kit(mesh, rank == 1)
    for y in [kit.leaf("weighted"), kit.leaf("gated")]:
        y.sum().backward()
    return mesh.rank


@pytest.mark.faults
def test_with_every_collective_compared_a_right_program_runs() -> None:
    with closing(World(2, DEADLINE)) as made:
        made.start(debugged)
        assert [outcome.value for outcome in made.outcomes(120)] == [0, 1]


NEW = len(CHANGES) * 3  # variants on each mesh


def run_variants(rank: int, shape: Shape, seeds: Sequence[int]) -> dict[int, Any]:
    """Returns how each variant ended on this rank, and the results that it had wrong."""
    mesh = make_mesh(*shape, timeout=DEADLINE)
    ends: dict[int, Any] = {}
    for seed in seeds:
        programs = Programs(Kit(mesh, rank == seed % 4))
        began, kind, text = time.monotonic(), "returned", ""
        wrong: list[str] = []
        try:
            run_variant(programs, seed, wrong)
        except Exception as error:
            kind, text = type(error).__name__, str(error)
        ends[seed] = wrong, (kind, text, time.monotonic() - began)
        mesh.recover()
    return ends


@pytest.mark.faults
@pytest.mark.parametrize(("shape", "first"), [(LINE, 0), (GRID, NEW), (GRID, 2 * NEW)], ids=str)
def test_no_variant_of_a_random_program_gives_a_wrong_number(shape: Shape, first: int) -> None:
    seeds = range(first, first + NEW)
    with closing(World(4, DEADLINE)) as made:
        made.start(run_variants, shape, seeds)
        outcomes = made.outcomes(1500)
    assert [outcome.end for outcome in outcomes] == ["returned"] * 4, "\n".join(map(str, outcomes))
    problems = []
    for seed in seeds:
        ends = [outcome.value[seed] for outcome in outcomes]
        harmless = all(kind == "returned" for _, (kind, _, _) in ends)
        named = all(is_right("", False, told) for _, told in ends)
        if any(wrong for wrong, _ in ends) or not (harmless or named):
            problems.append((seed, name_of(seed), ends))
    assert not problems, "\n".join(map(str, problems))
    print([(name_of(seed), outcomes[0].value[seed][1][0]) for seed in seeds])

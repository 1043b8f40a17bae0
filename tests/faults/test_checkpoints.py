"""Tests that ranks which depart at a checkpoint all have an error, or the right numbers."""

import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from shardmap_torch import ShardMapError, make_mesh
from shardmap_torch.saving import save
from tests.faults.support.cases import Kit
from tests.faults.support.checkpoints import ENDS, STEP, VARIANTS, Turn
from tests.faults.support.world import TIMEOUT, World

Told = tuple[str, str, float]
HARMLESS = {
    *("a copy", "late", "in a thread", "in inference", "without gradients", "old ones that stay"),
    *("on another default device", "a gradient loaded", "another bit", "a DTensor on another mesh"),
    "another mesh loaded",
}
"""Departures that may end with the right numbers on all ranks."""


def run_variants(rank: int, names: Sequence[str], folder: str, odd: int) -> dict[str, Told]:
    mesh = make_mesh((2,), ("tp",))
    told: dict[str, Told] = {}
    for number, name in enumerate(names):
        turn = Turn(Kit(mesh, rank == odd), Path(folder) / str(number))
        save(Turn(Kit(mesh, False), turn.root).tree(), turn.root, STEP)
        began = time.monotonic()
        try:
            VARIANTS[name](turn)
            told[name] = "returned", "", time.monotonic() - began
        except ShardMapError as error:
            told[name] = type(error).__name__, str(error), time.monotonic() - began
        except BaseException as error:
            told[name] = f"raw {type(error).__name__}", str(error), time.monotonic() - began
        mesh.recover()
    dist.barrier()  # or the first to be done would leave while the other still connects
    return told


def problems_of(name: str, ends: Sequence[Told]) -> list[str]:
    kinds = {kind for kind, _, _ in ends}
    if kinds == {"returned"}:
        return [] if name in HARMLESS else ["nobody is told"]
    return [
        f"rank {rank}: {kind} after {seconds:.1f} s: {text}"
        for rank, (kind, text, seconds) in enumerate(ends)
        if kind.startswith("raw") or "rank" not in text or seconds > TIMEOUT + 5
    ]


@pytest.mark.parametrize(
    ("odd", "every"), [(1, 8), *(pytest.param(odd, 1, marks=pytest.mark.faults) for odd in (0, 1))]
)
def test_a_departing_rank_gives_every_rank_an_error(odd: int, every: int, tmp_path: Path) -> None:
    names = list(VARIANTS)[::every]
    with closing(World(2, TIMEOUT)) as made:
        made.start(run_variants, names, str(tmp_path), odd)
        outcomes = made.outcomes(280)
    assert [outcome.end for outcome in outcomes] == ["returned"] * 2, "\n".join(map(str, outcomes))
    for name in names:
        print(name, *(outcome.value[name] for outcome in outcomes), sep="\n    ")
    found = {name: problems_of(name, [o.value[name] for o in outcomes]) for name in names}
    assert not any(found.values()), "\n".join(f"{k}: {v}" for k, v in found.items() if v)


def run_to_an_end(rank: int, name: str, folder: str) -> Any:
    turn = Turn(Kit(make_mesh((2,), ("tp",)), rank == 1), Path(folder))
    save(turn.tree(), turn.root, STEP)
    began = time.monotonic()
    try:
        with ENDS[name](turn):
            turn.load() if "read" in name else turn.save()
    except ShardMapError as error:
        return type(error).__name__, str(error), time.monotonic() - began
    return "returned", "", time.monotonic() - began


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=() if n == "while it writes" else pytest.mark.faults) for n in ENDS],
)
def test_a_rank_that_ends_at_a_checkpoint_is_named_by_the_other(name: str, tmp_path: Path) -> None:
    with closing(World(2, TIMEOUT)) as made:
        made.start(run_to_an_end, name, str(tmp_path))
        kind, text, seconds = made.outcomes(60, [1])[0].value
    assert kind == "CommunicationError"
    assert "rank 1" in text
    assert seconds < TIMEOUT + 5

"""A kill at any moment of a save leaves the newest complete checkpoint, and training goes on."""

import os
import signal
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from shardmap_torch import I, P, all_reduce, device_put, full, make_mesh, shard_map
from shardmap_torch.saving import api, folders, latest, load, save, storage
from tests.support.pool import Gloo, WorkerError

STEPS = 6


def train(folder: Path, die_at: str, rank: int, step: int) -> list[torch.Tensor]:
    """Trains from the newest checkpoint; dies at a moment of the save of one step."""
    mesh = make_mesh((2,), ("tp",))

    @shard_map(mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
    def update(w: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        return w * 1.25 + all_reduce(w.square().sum(), "tp", dst=I).sin() * number

    state: Any = {"w": device_put(torch.arange(1.0, 9.0), mesh, P("tp"))}
    done = latest(folder)
    if done is not None:
        state = load(state, folder)
    for number in range(done or 0, STEPS):
        state = {"w": update(state["w"], torch.tensor(float(number)))}
        with dying(die_at if (mesh.rank, number + 1) == (rank, step) else ""):
            save(state, folder, number + 1, keep=2)
    return [full(state["w"]), torch.tensor(done or 0)]


def dying(at: str) -> Any:
    def die(*args: Any, **kwargs: Any) -> Any:
        os.kill(os.getpid(), signal.SIGKILL)

    places: dict[str, Any] = {
        "": mock.patch.object(api, "_unused", None, create=True),
        "before it begins": mock.patch.object(folders.Writer, "begin", die),
        "with its file half written": mock.patch("os.fsync", die),
        "before the manifest": mock.patch.object(storage.RankFiles, "finish", die),
        "before the rename": mock.patch.object(Path, "rename", die),
        "before older ones are deleted": mock.patch.object(folders, "prune", die),
        "while an older one is deleted": mock.patch("shutil.rmtree", die),
    }
    return places[at]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("at", "rank", "resumed"),
    [
        ("before it begins", 0, 3),
        ("with its file half written", 0, 3),
        ("with its file half written", 1, 3),
        ("before the manifest", 0, 3),
        ("before the rename", 0, 3),
        ("before older ones are deleted", 0, 4),
        ("while an older one is deleted", 0, 4),
    ],
)
def test_a_rank_killed_in_a_save_loses_at_most_that_step(
    gloo: Gloo, tmp_path: Path, at: str, rank: int, resumed: int
) -> None:
    expected, _ = gloo(2).run(train, tmp_path / "undisturbed", "", -1, -1)[0]
    with pytest.raises(WorkerError, match=f"rank {rank} of 2 died with exit code -9"):
        gloo(2).run(train, tmp_path / "killed", at, rank, 4)
    for found, done in gloo(2).run(train, tmp_path / "killed", "", -1, -1):
        assert done == resumed
        assert found.equal(expected)
    names = sorted(os.listdir(tmp_path / "killed"))
    assert names[-2:] == ["step-000000005", "step-000000006"]
    assert not any("unfinished" in name for name in names)

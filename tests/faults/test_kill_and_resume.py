"""Training under torchrun goes on by itself after kill -9, and ends with the same bits."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from shardmap_torch.saving import latest, manifest

REPO = Path(__file__).parent.parent.parent
STEPS = 30
SCRIPT = [str(REPO / "examples" / "train_gpt.py"), *"--mesh 1x2 --check 0 --sample 1".split()]
SCRIPT += "--length 16 --width 16 --heads 4 --hidden 32 --layers 1 --batch 8".split()
SCRIPT += ["--steps", str(STEPS), "--every", "1", "--resume"]


def start(folder: Path, max_restarts: int) -> "subprocess.Popen[bytes]":
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", str(max_restarts)]
    torchrun += ["--monitor-interval", "0.1"]
    own = ["--checkpoint", str(folder / "saved"), "--out", str(folder)]
    with (folder / "output.txt").open("w") as output:
        return subprocess.Popen(
            [*torchrun, *SCRIPT, *own],
            cwd=folder,
            env={**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"},
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def workers(agent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


def steps(folder: Path) -> set[str]:
    return set(os.listdir(folder / "saved")) if (folder / "saved").exists() else set()


def kill_at_random(agent: "subprocess.Popen[bytes]", folder: Path, kills: int, seed: int) -> int:
    """Kills a random worker at random moments of the training; returns how many were killed."""
    random_ = random.Random(seed)
    killed = 0
    while killed < kills and agent.poll() is None:
        # From a while before the first step of a start to a while after it.
        before, patience = steps(folder), time.monotonic() + 240
        while not steps(folder) - before and time.monotonic() < patience and agent.poll() is None:
            time.sleep(0.01)
        time.sleep(random_.uniform(0, 0.3))
        if f"step-{STEPS:09}" in steps(folder):
            break
        victims = workers(agent.pid)
        if victims:
            os.kill(random_.choice(victims), signal.SIGKILL)
            killed += 1
            while set(victims) & set(workers(agent.pid)) and agent.poll() is None:
                time.sleep(0.01)  # the agent ends the others, and starts all again
    return killed


def results(folder: Path) -> tuple[list[float], dict[str, int], dict[str, bytes]]:
    """The losses, and the bytes of the last checkpoint."""
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    last = manifest.folder_of(folder / "saved", STEPS)
    return losses, manifest.read(last).sizes(), {p.name: p.read_bytes() for p in last.iterdir()}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("undisturbed")
    assert start(folder, 0).wait(240) == 0, (folder / "output.txt").read_text()
    return folder


def disturb(folder: Path, kills: int, seed: int) -> int:
    agent = start(folder, max_restarts=kills + 3)
    try:
        killed = kill_at_random(agent, folder, kills, seed)
        assert agent.wait(240) == 0, (folder / "output.txt").read_text()
    finally:
        agent.terminate()
        agent.wait()
    return killed


@pytest.mark.faults
def test_killed_training_ends_with_the_bits_of_an_undisturbed_run(
    undisturbed: Path, tmp_path: Path
) -> None:
    assert disturb(tmp_path, kills=1, seed=0) == 1
    assert "resumed after step" in (tmp_path / "output.txt").read_text()
    assert results(tmp_path) == results(undisturbed)
    assert latest(tmp_path / "saved") == STEPS


@pytest.mark.faults
def test_training_that_is_killed_again_and_again_ends_with_the_same_bits(
    undisturbed: Path, tmp_path: Path
) -> None:
    assert disturb(tmp_path, kills=5, seed=1) >= 1
    assert results(tmp_path) == results(undisturbed)


@pytest.mark.faults
def test_50_kills_at_random_moments_resume_from_what_is_complete() -> None:
    command = [sys.executable, "-m", "tests.faults.support.trainings", "50", "0"]
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=REPO, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    tally = json.loads(done.stdout.splitlines()[-1])
    print(tally)
    assert tally["wrong"] == []
    assert tally["kills"] == 50
    assert tally["resumed"] >= 25  # kills come before that, too, and each run starts once
    assert tally["half_written"] >= 5  # or the moments are not random

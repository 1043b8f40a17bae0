"""Default process groups under torchrun: each attempt of a job has keys of its own in the store."""

import os
import subprocess
import sys
import threading
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch._C._distributed_c10d import TCPStore

from shardmap_torch.control.attempts import meet

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)

SCRIPT = """
import os, signal, time
from shardmap_torch import make_mesh

attempt, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
if attempt > 0 and rank == 2 - attempt:
    time.sleep(1)  # the other one would find the address of a killed process meanwhile
mesh = make_mesh((2,), ("dp",))
if attempt < 2 and mesh.rank == 1 - attempt:
    os.kill(os.getpid(), signal.SIGKILL)
open(f"attempt {attempt}, rank {mesh.rank}", "w").close()
"""


@pytest.mark.slow
def test_ranks_that_torchrun_starts_again_meet_no_killed_ones(tmp_path: Path) -> None:
    """Each restart is for a kill: none is spent on an address of a process that is gone."""
    (tmp_path / "script.py").write_text(SCRIPT)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    torchrun += ["--nproc-per-node", "2", "--max-restarts", "2", "--monitor-interval", "0.1"]
    done = subprocess.run(
        [*torchrun, str(tmp_path / "script.py")],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    finished = {path.name for path in tmp_path.glob("attempt 2*")}
    assert finished == {"attempt 2, rank 0", "attempt 2, rank 1"}, done.stderr


def met(store: TCPStore, ranks: range, size: int) -> dict[int, str]:
    """The names that these ranks of a group get; without the others they give up, as if killed."""
    names: dict[int, str] = {}
    timeout = MINUTE if len(ranks) == size else SECOND / 2

    def run(rank: int) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # torch has it
        own.set_timeout(timeout)
        with suppress(RuntimeError):
            names[rank] = meet(own, rank, size, timeout)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=MINUTE)


def test_all_ranks_of_an_attempt_get_one_name_and_each_attempt_another() -> None:
    store = new_store()
    attempts = [met(store, range(4), 4) for _ in range(3)]
    assert all(set(names) == set(range(4)) for names in attempts)
    assert all(len(set(names.values())) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 3


@pytest.mark.parametrize("came", [range(1, 3), range(2)], ids=["rank 0", "the last rank"])
def test_an_attempt_in_which_a_rank_was_killed_leaves_the_next_one_right(came: range) -> None:
    store = new_store()
    first = met(store, came, 3)
    second = met(store, range(3), 3)
    assert len(set(second.values())) == 1
    assert not set(first.values()) & set(second.values())


def test_rank_0_names_the_ranks_that_have_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"nothing was heard from ranks \[1, 2\]"):
        meet(new_store(), 0, 3, SECOND)

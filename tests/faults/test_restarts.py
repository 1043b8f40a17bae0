"""Default process groups under torchrun, whose workers are killed and started again."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

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


@pytest.mark.faults
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

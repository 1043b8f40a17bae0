"""Kills the GPT example at random moments and resumes it, many times.

python -m tests.faults.support.trainings [kills] [seed]

Two processes are forked from this one, which has imported the example already, so that a start
costs seconds; they are ended by SIGKILL, one or both, and started again, as torchrun does. A run
that has come to its end must have the bits of one that was never disturbed.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Final

from torch._C._distributed_c10d import TCPStore

from examples import train_gpt
from shardmap_torch.saving import latest, manifest

STEPS: Final = 24
_SIZES: Final = "--length 8 --width 16 --heads 2 --hidden 16 --layers 1 --batch 4"
_FLAGS: Final = f"--parallel dp+tp --mesh 1x2 --check 0 --sample 1 --every 1 --resume {_SIZES}"
_LIMIT: Final = 300.0
_RESUMED: Final = re.compile(r"resumed after step (\d+)")


@dataclass
class Tally:
    """The outcomes of all runs.

    Attributes:
        kills: of one or both processes.
        half_written: kills that left a folder that was not complete.
        resumed: starts that went on from a checkpoint, which was the newest complete one.
        wrong: what was not as it must be.
    """

    kills: int = 0
    half_written: int = 0
    resumed: int = 0
    runs: int = 0
    wrong: list[str] = field(default_factory=list)


def start(folder: Path) -> tuple[TCPStore, list[int]]:
    """Forks two processes that train, and hosts their store."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    (folder / "output.txt").write_text("")
    return store, [_fork(rank, store.port, folder) for rank in range(2)]


def _fork(rank: int, port: int, folder: Path) -> int:
    pid = os.fork()
    if pid:
        return pid
    where = {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2"}
    os.environ.update(where, MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    os.environ.update(TORCHELASTIC_USE_AGENT_STORE="True", GLOO_SOCKET_IFNAME="lo")
    output = os.open(folder / "output.txt", os.O_WRONLY | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    code = 1
    try:
        own = ["--steps", str(STEPS), "--out", str(folder), "--checkpoint", str(folder / "saved")]
        train_gpt.main([*_FLAGS.split(), *own])
        code = 0
    except BaseException as error:
        print(f"rank {rank}: {type(error).__name__}: {error}", flush=True)
    finally:
        sys.stdout.flush()
        os._exit(code)


def wait(pids: Sequence[int], seconds: float = _LIMIT) -> list[int | None]:
    """The exit codes; None of those that had to be killed."""
    codes: dict[int, int | None] = {}
    end = time.monotonic() + seconds
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > end:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                codes[pid] = None
        time.sleep(0.005)
    return [codes[pid] for pid in pids]


def results(folder: Path) -> tuple[object, dict[str, bytes]]:
    """The losses, and the bytes of the last checkpoint."""
    losses = json.loads((folder / "losses.json").read_text())
    last = manifest.folder_of(folder / "saved", STEPS)
    return (losses, manifest.read(last).sizes()), {p.name: p.read_bytes() for p in last.iterdir()}


def kill_once(folder: Path, draw: random.Random, tally: Tally) -> bool:
    """One start that ends by a kill, at any moment; says whether it could be killed in time."""
    before = latest(folder / "saved") or 0
    store, pids = start(folder)
    step = min(draw.randint(before + 1, before + 6), STEPS - 1)
    end = time.monotonic() + _LIMIT
    while time.monotonic() < end and not _has_begun(folder, step) and draw.random() > 1e-4:
        time.sleep(0.002)
    time.sleep(draw.uniform(0, 0.08))
    alive = [pid for pid in pids if os.waitpid(pid, os.WNOHANG)[0] == 0]
    if len(alive) < 2:
        wait(alive)
        return False
    victims = pids if draw.random() < 0.3 else [draw.choice(pids)]
    for pid in victims:
        os.kill(pid, signal.SIGKILL)
    # The other gets an error within the deadline; as torchrun does, it is not waited for.
    time.sleep(draw.uniform(0, 0.3))
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    wait(pids)
    del store
    tally.kills += 1
    tally.half_written += any("unfinished" in p.name for p in (folder / "saved").glob("*"))
    check_resumed(folder, before, tally)
    return True


def _has_begun(folder: Path, step: int) -> bool:
    return any((folder / "saved").glob(f"step-{step:09}*"))


def check_resumed(folder: Path, before: int, tally: Tally) -> None:
    """Compares what a start said it resumed from with the newest complete checkpoint."""
    said = _RESUMED.search((folder / "output.txt").read_text())
    if said is not None:
        tally.resumed += 1
        if int(said[1]) != before:
            tally.wrong.append(f"resumed after {said[1]}, not {before}")


def finish(folder: Path, tally: Tally) -> None:
    """One start that is left alone."""
    before = latest(folder / "saved") or 0
    store, pids = start(folder)
    codes = wait(pids)
    del store
    check_resumed(folder, before, tally)
    if codes != [0, 0]:
        tally.wrong.append(f"exit codes {codes}: {(folder / 'output.txt').read_text()[-2000:]}")


def run(kills: int, seed: int) -> Tally:
    """Runs until so many were killed, three or so a run; each run is compared with the first."""
    draw, tally = random.Random(seed), Tally()
    with tempfile.TemporaryDirectory() as name:
        undisturbed = Path(name) / "undisturbed"
        undisturbed.mkdir()
        finish(undisturbed, tally)
        expected = results(undisturbed)
        while tally.kills < kills and len(tally.wrong) < 3:
            folder = Path(name) / f"run-{tally.runs}"
            folder.mkdir()
            while (latest(folder / "saved") or 0) < STEPS - 2 and tally.kills < kills:
                if not kill_once(folder, draw, tally):
                    break  # it came to its end before
                print(f"{time.ctime()} {tally.kills} kills", file=sys.stderr, flush=True)
            if not (folder / "losses.json").exists():
                finish(folder, tally)
            tally.runs += 1
            same = results(folder) == expected
            print(f"run {tally.runs}: same bits: {same}", file=sys.stderr, flush=True)
            if not same:
                tally.wrong.append(f"run {tally.runs} has other bits")
    return tally


if __name__ == "__main__":
    sizes = [int(each) for each in sys.argv[1:]]
    print(json.dumps(asdict(run(*(sizes or [50, 0])))))

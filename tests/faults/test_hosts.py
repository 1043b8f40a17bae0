"""Several hosts, as network namespaces: training over them, and hosts and links that fail."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from shardmap_torch.control.recorder import VARIABLE
from tests.faults.support.hosts import Hosts, reason

REPO = Path(__file__).parent.parent.parent
DEADLINE = 10.0
START = 300.0  # seconds; eight processes import torch on a machine that may be busy
STEPS = 12
Told = list[dict[str, Any]]

pytestmark = [
    pytest.mark.faults,
    pytest.mark.skipif("SHARDMAP_FAULTS" not in os.environ or bool(reason()), reason=reason()),
]


@contextmanager
def hosts(number: int) -> Iterator[Hosts]:
    made = Hosts(number)
    try:
        yield made
    finally:
        made.close()


def wait_for(happened: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not (done := happened()) and time.monotonic() < end:
        time.sleep(0.1)
    return done


# A program without an agent: what each rank sees.


def start_ranks(made: Hosts, num_ranks: int, folder: Path, width: int = 4) -> list[Path]:
    """Starts the ranks, host by host; the store is a thread of rank 0."""
    outputs = [folder / f"rank-{rank}.txt" for rank in range(num_ranks)]
    for rank, output in enumerate(outputs):
        env = {
            "RANK": str(rank),
            "WORLD_SIZE": str(num_ranks),
            "MASTER_ADDR": made.address(0),
            "MASTER_PORT": "29511",
            VARIABLE: str(folder / "dumps"),
            "PYTHONPATH": str(REPO),
        }
        program = ["-m", "tests.faults.support.host_program"]
        sizes = [str(made.number), str(DEADLINE), str(width)]
        host = rank * made.number // num_ranks
        made.start(host, [sys.executable, *program, *sizes], output, env)
    return outputs


def told(output: Path) -> Told:
    lines = output.read_text().splitlines() if output.exists() else []
    return [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]


def test_a_line_is_told_that_warnings_of_torch_surround(tmp_path: Path) -> None:
    program = (
        "import os, sys; from tests.faults.support.host_program import say; "
        "os.write(2, b'[W] it has'); say(step=3); os.write(2, b'failed')"
    )
    output = tmp_path / "rank-0.txt"
    with output.open("ab") as file:
        environment = {**os.environ, "RANK": "0", "PYTHONPATH": str(REPO)}
        command = [sys.executable, "-c", program]
        subprocess.run(command, env=environment, stdout=file, stderr=file, check=True)
    assert [line["step"] for line in told(output)] == [3]


def has_stepped(outputs: list[Path], step: int) -> Callable[[], bool]:
    def check() -> bool:
        found = [told(output) for output in outputs]
        errors = [told[-1] for told in found if told and "error" in told[-1]]
        assert not errors, errors
        return all(any(line.get("step") == step for line in lines) for lines in found)

    return check


STRIKES: dict[str, Callable[[Hosts, int], None]] = {
    "its cable is pulled": Hosts.unplug,
    "it loses its power": Hosts.kill,
}


@pytest.mark.parametrize("strike", list(STRIKES))
@pytest.mark.parametrize(("number", "lost"), [(2, 1), (2, 0), (4, 2)])
def test_a_host_that_disappears_is_an_error_in_time_on_every_side(
    number: int, lost: int, strike: str, tmp_path: Path
) -> None:
    with hosts(number) as made:
        outputs = start_ranks(made, 4, tmp_path)
        assert wait_for(has_stepped(outputs, 3), START)
        STRIKES[strike](made, lost)
        struck = time.time()
        per = 4 // number
        gone = range(lost * per, (lost + 1) * per)
        # Without power it says nothing; without a cable it gets an error as well.
        left = [r for r in range(4) if strike == "its cable is pulled" or r not in gone]

        def all_ended() -> bool:
            return all("error" in (told(outputs[rank]) or [{}])[-1] for rank in left)

        assert wait_for(all_ended, DEADLINE + 15), [told(output)[-1] for output in outputs]
    for rank in left:
        lines = told(outputs[rank])
        error = lines[-1]
        assert all(line["right"] for line in lines[:-1])
        assert error["error"] in ("CommunicationError", "CollectiveMismatchError"), error
        assert error["at"] - struck < DEADLINE + 5, error
        missing = gone if rank not in gone else [r for r in range(4) if r not in gone]
        assert any(str(other) in error["text"] for other in missing), error
        assert "host_program.py:" in error["text"], error


def test_a_link_of_10_megabits_makes_steps_slow_and_not_wrong(tmp_path: Path) -> None:
    with hosts(2) as made:
        outputs = start_ranks(made, 4, tmp_path, width=65_536)  # 256 KiB a message
        assert wait_for(has_stepped(outputs, 2), START)
        made.slow(1, "10mbit")
        first = told(outputs[0])[-1]
        assert wait_for(has_stepped(outputs, first["step"] + 8), 120)
        last = told(outputs[0])[-1]
    seconds = (last["at"] - first["at"]) / (last["step"] - first["step"])
    print(f"{seconds:.2f} s a step over 10 Mbit/s")
    assert all(line["right"] for output in outputs for line in told(output))
    assert seconds > 0.15  # 2^21 bits over the slow link, at least once each way at a time


# The example under torchrun.


def torchrun(made: Hosts, host: int, folder: Path, resume: bool, restarts: int = 0) -> Any:
    command = [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(made.number)]
    command += ["--max-restarts", str(restarts)]
    command += ["--nproc-per-node", "2", "--rdzv-backend", "c10d", "--rdzv-id", "1"]
    command += ["--rdzv-endpoint", f"{made.address(0)}:29500", "--monitor-interval", "0.1"]
    command += ["--rdzv-conf", f"is_host={int(host == 0)}", "--local-addr", made.address(host)]
    command += [str(REPO / "examples" / "train_gpt.py"), "--mesh", f"{made.number}x2"]
    command += "--parallel dp+tp --check 0 --sample 1 --every 1 --length 16 --width 16".split()
    command += "--heads 4 --hidden 32 --layers 1 --batch 8".split()
    command += ["--steps", str(STEPS), "--out", str(folder)]
    command += ["--checkpoint", str(folder / "saved"), *["--resume"] * resume]
    return made.start(host, command, folder / f"host-{host}.txt", {"PYTHONPATH": str(REPO)})


def train(made: Hosts, folder: Path) -> list[float]:
    agents = [torchrun(made, host, folder, resume=False) for host in range(made.number)]
    assert [agent.wait(2 * START) for agent in agents] == [0] * made.number, outputs_of(folder)
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


def outputs_of(folder: Path) -> str:
    return "\n".join(path.read_text()[-3000:] for path in sorted(folder.glob("host-*.txt")))


def undisturbed(number: int, folder: Path) -> list[float]:
    """The losses of as many processes on one host."""
    folder.mkdir()
    with hosts(1) as one:
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node"]
        command += [str(2 * number), str(REPO / "examples" / "train_gpt.py")]
        command += ["--mesh", f"{number}x2", "--out", str(folder), "--steps", str(STEPS)]
        command += "--parallel dp+tp --check 0 --sample 1 --length 16 --width 16".split()
        command += "--heads 4 --hidden 32 --layers 1 --batch 8".split()
        command[3:3] = ["--master-addr", one.address(0), "--master-port", "29500"]
        agent = one.start(0, command, folder / "host-0.txt", {"PYTHONPATH": str(REPO)})
        assert agent.wait(2 * START) == 0, outputs_of(folder)
    losses: list[float] = json.loads((folder / "losses.json").read_text())
    return losses


@pytest.mark.parametrize("number", [2, 4])
def test_the_example_trains_over_hosts_as_on_one(number: int, tmp_path: Path) -> None:
    expected = undisturbed(number, tmp_path / "one")
    with hosts(number) as made:
        assert train(made, tmp_path) == expected


def test_training_goes_on_by_itself_where_workers_of_some_hosts_are_killed(tmp_path: Path) -> None:
    """The agents count restarts each for itself; the workers of all meet under the same keys."""
    expected = undisturbed(2, tmp_path / "one")
    saved = tmp_path / "saved"
    with hosts(2) as made:
        agents = [torchrun(made, host, tmp_path, True, restarts=3) for host in range(2)]
        for step, host in ((2, 1), (5, 1), (8, 0)):
            has_saved = partial(lambda step: any(saved.glob(f"step-*{step:02}")), step)
            assert wait_for(has_saved, START), outputs_of(tmp_path)
            os.kill(workers(agents[host].pid)[-1], signal.SIGKILL)
        assert [agent.wait(2 * START) for agent in agents] == [0, 0], outputs_of(tmp_path)
        assert (tmp_path / "host-0.txt").read_text().count("resumed after step") == 3
    assert json.loads((tmp_path / "losses.json").read_text()) == expected


def workers(agent: int) -> list[int]:
    return [int(pid) for pid in Path(f"/proc/{agent}/task/{agent}/children").read_text().split()]


@pytest.mark.parametrize("what", ["the agent", "the host"])
def test_training_goes_on_where_the_host_of_the_rendezvous_starts_again(
    what: str, tmp_path: Path
) -> None:
    expected = undisturbed(2, tmp_path / "one")
    with hosts(2) as made:
        agents = [torchrun(made, host, tmp_path, resume=True) for host in range(2)]
        saved = tmp_path / "saved"
        assert wait_for(lambda: any(saved.glob("step-*03")), START), outputs_of(tmp_path)
        if what == "the agent":  # its workers are left alone
            os.kill(agents[0].pid, signal.SIGKILL)
        else:
            made.kill(0)
        # The other host's agent, and all workers, end by themselves.
        assert wait_for(lambda: not made.pids(0) and not made.pids(1), 120), outputs_of(tmp_path)
        assert not (tmp_path / "losses.json").exists()
        agents = [torchrun(made, host, tmp_path, resume=True) for host in range(2)]
        assert [agent.wait(2 * START) for agent in agents] == [0, 0], outputs_of(tmp_path)
        assert "resumed after step" in (tmp_path / "host-0.txt").read_text()
    assert json.loads((tmp_path / "losses.json").read_text()) == expected

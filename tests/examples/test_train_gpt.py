"""The demo runs as users run it, and all ways of running it have the same losses."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from examples import train_gpt
from examples.gpt.parallel import CHOICES
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

REPO = Path(__file__).parent.parent.parent
SMALL = "--length 16 --width 16 --heads 4 --hidden 32 --layers 1 --batch 8".split()
QUICK = [*SMALL, *"--steps 3 --sample 2 --dtype float64".split()]
# The ranks add the same float64 numbers in another order, in a few steps.
EXACT = 1e-10


def run_main(arguments: list[str], folder: Path) -> list[float]:
    return train_gpt.main([*arguments, "--out", str(folder)])


def without_check(mesh: str) -> list[str]:
    return [*QUICK, "--check", "0", "--mesh", mesh]


def test_the_demo_shows_what_it_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    losses = run_main([*QUICK[:-2], "--mesh", "2x4", "--check", "1"], tmp_path)
    shown = " ".join(capsys.readouterr().out.split())
    for text in (
        "simulated mesh (dp=2, tp=4)",
        "(32, 16) sharded by P('tp')",
        "(8, 16) sharded by P('dp')",
        "(8, 16, 256) sharded by P('dp', None, 'tp')",
        "step 1, torch.float64: loss and 9 gradients equal one device's",
        "step 1, torch.float32: loss and 9 gradients equal one device's",
        "3/3 loss",
        "unigram entropy 3.2",
        "bigram entropy 2.4",
        "final loss",
        "held-out loss",
        "sample",
    ):
        assert text in shown
    assert json.loads((tmp_path / "losses.json").read_text()) == losses
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.fuzz
def test_processes_have_the_losses_of_a_simulated_mesh(gloo: Gloo, tmp_path: Path) -> None:
    simulated = run_main(without_check("2x4"), tmp_path)
    for losses in gloo(4).run(run_main, without_check("2x2"), tmp_path):
        assert losses == pytest.approx(simulated, rel=EXACT)


@pytest.mark.parametrize(
    ("flags", "overlap"), [([], "off"), (["--overlap"], "auto"), (["--overlap", "off"], "off")]
)
def test_the_flag_alone_overlaps_where_it_pays(flags: list[str], overlap: str) -> None:
    assert train_gpt.parse(flags).overlap == overlap


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--mesh", "2"], "--mesh needs 2 sizes, of dp x tp"),
        (["--mesh", "2xa"], "argument --mesh: invalid mesh_sizes value: '2xa'"),
        (["--parallel", "ddp"], f"argument --parallel: 'ddp' is none of {', '.join(CHOICES)}"),
        (["--steps", "0"], "--steps must be at least 1"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        train_gpt.main(flags)
    assert capsys.readouterr().err.endswith(f"error: {text}\n")


@pytest.mark.fuzz
@pytest.mark.parametrize("mesh", ["1x2", "2x1", "2x2"])
def test_the_script_under_torchrun_has_the_losses_of_a_simulated_mesh(
    mesh: str, tmp_path: Path
) -> None:
    simulated = run_main(without_check("2x4"), tmp_path)
    num_ranks = int(mesh[0]) * int(mesh[2])
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    script = ["--nproc-per-node", str(num_ranks), str(REPO / "examples" / "train_gpt.py")]
    done = subprocess.run(
        [*torchrun, *script, *QUICK, "--check", "1", "--mesh", mesh, "--out", str(tmp_path)],
        cwd=tmp_path,
        env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("process_group mesh (dp=") == 4  # rank 0 alone prints
    assert json.loads((tmp_path / "losses.json").read_text()) == pytest.approx(simulated, rel=EXACT)


def test_the_demo_learns_more_than_how_often_bytes_occur(tmp_path: Path) -> None:
    flags = sized("--steps 30 --layers 1 --batch 8", "--steps 60")
    losses = run_main(f"{flags} --sample 1 --check 0".split(), tmp_path)
    unigram_entropy = 3.26  # of this text; the demo's 240 steps end far below the bigrams' 2.45
    assert sum(losses[-10:]) / 10 < unigram_entropy - sized(0.3, 0.5)

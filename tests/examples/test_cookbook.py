"""The cookbook's script trains, resumes on another mesh, and computes the same on all meshes."""

import json
import re
from pathlib import Path

import pytest

from examples import cookbook
from tests.support.pool import Gloo

REPO = Path(__file__).parents[2]
SMALL = "--width 16 --heads 2 --layers 1 --length 8 --batch 8 --steps 2 --every 1 --warmup 1"
# bf16 has 8 bits, and other ranks add in another order; the loss is a mean of 64 targets.
ROUNDING = 1e-3


def train(folder: Path, flags: str) -> list[float]:
    files = ["--data", str(REPO / "LICENSE"), "--folder", str(folder)]
    return cookbook.main([*SMALL.split(), *flags.split(), *files])


def test_a_run_resumes_on_another_mesh_and_logs(tmp_path: Path) -> None:
    whole = train(tmp_path / "whole", "--mesh 2x2 --dropout 0.5")
    first = train(tmp_path / "parts", "--mesh 2x2 --dropout 0.5 --until 1 --recompute")
    rest = train(tmp_path / "parts", "--mesh 1x2 --dropout 0.5 --resume")
    assert first + rest == pytest.approx(whole, rel=ROUNDING)
    log = [json.loads(line) for line in (tmp_path / "parts" / "log.jsonl").read_text().splitlines()]
    assert [entry["step"] for entry in log] == [1, 1, 2, 2]
    assert [entry["loss"] for entry in log if "loss" in entry] == first + rest
    assert whole != pytest.approx(train(tmp_path / "other", "--mesh 1x1 --dropout 0"), rel=ROUNDING)


@pytest.mark.fuzz  # tests/examples/test_gpt.py trains on processes
def test_processes_train_as_simulated_ranks_do(tmp_path: Path, gloo: Gloo) -> None:
    simulated = train(tmp_path / "simulated", "--mesh 1x2")
    losses = gloo(2).run(train, tmp_path / "processes", "--mesh 1x2")
    assert losses[0] == losses[1]
    assert losses[0] == pytest.approx(simulated, rel=ROUNDING)


def test_the_page_shows_lines_of_the_script() -> None:
    page = REPO / "docs" / "cookbook.md"
    blocks = re.findall(r"^```python\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)
    script, shown = (
        {line.partition("  #")[0].strip() for line in text.splitlines()}
        for text in (Path(cookbook.__file__).read_text(), "\n".join(blocks))
    )
    assert len(blocks) > 2
    assert shown <= script

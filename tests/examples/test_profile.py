"""The profile command shows, side by side, steps that compute the same."""

import json
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch

from examples.gpt import profile
from examples.gpt.model import Config
from examples.gpt.parallel import Parallel
from shardmap_torch import make_mesh
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

SMALL = "--width 16 --layers 1 --length 16 --batch 4 --steps 1".split()


def test_every_choice_has_the_loss_and_the_norm_of_one_device(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    choices = ["plain", "tp", *sized([], ["tp+sp+overlap"]), "zero"]
    results = profile.main([*SMALL, "--parallel", *choices, "--out", str(tmp_path)])
    plain = results["plain"]
    assert list(results) == choices
    for found in results.values():
        # float32 sums in another order.
        assert found.loss == pytest.approx(plain.loss, rel=1e-5)
        assert found.norm == pytest.approx(plain.norm, rel=1e-4)
        assert found.milliseconds > 0
        assert found.peak_bytes > 10_000
        assert (found.communicating, found.hidden) == (0.0, None)  # in one process
    assert plain.sent == {}
    assert set(results["zero"].sent) == {"dp", "dp,tp"}  # shards; a scalar of the norm
    shown = capsys.readouterr().out
    assert "one step on 4 simulated ranks in one process" in " ".join(shown.split())
    assert all(choice in shown for choice in choices)
    assert (tmp_path / "profile.png").read_bytes().startswith(b"\x89PNG")
    numbers = json.loads((tmp_path / "profile.json").read_text())
    assert numbers["tp"]["sent"] == dict(results["tp"].sent)


@dataclass(frozen=True)
class Event:
    """Stands for one of torch's profiler."""

    title: str
    start: int
    end: int

    def name(self) -> str:
        return self.title

    def start_ns(self) -> int:
        return self.start

    def end_ns(self) -> int:
        return self.end


def test_what_runs_at_the_same_time_is_counted_once() -> None:
    spans = ((30, 40), (0, 10), (5, 20), (6, 8), (20, 25))
    events = [Event("gloo:send", *span) for span in spans] + [Event("aten::mm", 0, 100)]
    assert profile._spans(events, "gloo:") == [(0, 25), (30, 40)]


def sent_by_processes(folder: Path) -> dict[str, profile.Measured]:
    choices = ["plain", "tp+sp", "tp+sp+overlap"]
    return profile.main([*SMALL, "--ranks", "2", "--parallel", *choices, "--out", str(folder)])


@pytest.mark.fuzz
def test_on_processes_the_communication_is_measured(gloo: Gloo, tmp_path: Path) -> None:
    for results in gloo(2).run(sent_by_processes, tmp_path, timeout=240):
        assert results["plain"].hidden is None
        for choice in ("tp+sp", "tp+sp+overlap"):
            assert results[choice].communicating > 0
            assert 0 <= (results[choice].hidden or 0) <= 1
            assert results[choice].hidden is not None


def test_zero_and_data_parallelism_send_the_same_bytes_of_gradients() -> None:
    """Reduce-scatter and all-gather are the halves of an all-reduce."""
    config = Config(length=16, width=16, layers=1)
    batch = torch.zeros(4, 17, dtype=torch.int64)
    sent = {}
    for choice in ("dp", "zero"):
        parallel = Parallel.of(choice)
        mesh = make_mesh((4, 1), parallel.mesh_axes, kind="abstract")
        chosen = replace(config, parallel=parallel)
        sent[choice] = profile.bytes_sent(mesh, chosen, batch)["dp"]
    # The norm and the loss are scalars; float32, so four bytes each, twice 3/4 of them.
    assert abs(sent["zero"] - sent["dp"]) <= 4 * 4


def test_a_script_beside_it_finds_pythons_own_profile_module() -> None:
    folder = Path(profile.__file__).parent.parent
    code = "import profile; profile.run"
    subprocess.run([sys.executable, "-c", code], cwd=folder, check=True)


@pytest.mark.parametrize(("num_axes", "sizes"), [(1, (8,)), (2, (2, 4)), (3, (2, 2, 2))])
def test_ranks_are_spread_over_the_axes_of_a_choice(num_axes: int, sizes: tuple[int, ...]) -> None:
    assert profile.sizes_of(num_axes, 8) == sizes


def test_an_unknown_choice_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        profile.main(["--parallel", "plain", "ddp"])
    assert "'ddp' is none of dp, fsdp, zero, ep, cp, pp, tp, sp" in capsys.readouterr().err

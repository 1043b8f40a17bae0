"""The script for a mesh trains as that for one device, on every mesh, and differs by 26 lines."""

import contextlib
import difflib
import io
import re
from pathlib import Path

import pytest
import torch
from torch import Tensor

from examples.nanogpt import parallel, plain
from shardmap_torch import full
from tests.support.pool import Gloo

REPO = Path(__file__).parents[2]
FLAGS = "--steps 4 --warmup 2 --every 2 --batch 4 --accumulate 2".split()
EXACT = "--dtype float64"
Run = tuple[plain.Log, list[Tensor]]


def train(script: str, folder: Path, flags: str = EXACT) -> Run:
    """Returns the log, and the clipped gradients of the last step as one device has them."""
    main = {"plain": plain, "parallel": parallel}[script].main
    log, model = main([*FLAGS, *flags.split(), "--folder", str(folder)])
    return log, full([p.grad for p in model.parameters()])


def printed_and_log(folder: Path, flags: str) -> tuple[str, plain.Log]:
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        log, _ = train("parallel", folder, f"{EXACT} {flags}")
    return printed.getvalue(), log


def assert_equal(run: Run, expected: Run, rtol: float = 1e-9) -> None:
    assert [set(entry) for entry in run[0]] == [set(entry) for entry in expected[0]]
    for entry, other in zip(run[0], expected[0], strict=True):
        assert entry == pytest.approx(other, rel=rtol)
    torch.testing.assert_close(run[1], expected[1], rtol=rtol, atol=rtol)


@pytest.fixture(scope="module")
def one_device(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """A run of four steps of the script for one device."""
    return train("plain", tmp_path_factory.mktemp("plain"))


@pytest.mark.slow
@pytest.mark.parametrize("mesh", ["1x1", "2x2"])
def test_simulated_ranks_have_the_losses_and_gradients_of_one_device(
    mesh: str, one_device: Run, tmp_path: Path
) -> None:
    assert {"step", "loss", "norm", "held_out"} == set(one_device[0][-1])
    assert_equal(train("parallel", tmp_path, f"{EXACT} --mesh {mesh}"), one_device)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "count"),
    [
        *[pytest.param(f"{a}x{b}", 2, marks=pytest.mark.fuzz) for a, b in ((2, 1), (1, 2))],
        ("2x2", 4),
    ],
)
def test_processes_have_the_losses_and_gradients_of_one_device(
    mesh: str, count: int, one_device: Run, tmp_path: Path, gloo: Gloo
) -> None:
    for run in gloo(count).run(train, "parallel", tmp_path, f"{EXACT} --mesh {mesh}"):
        assert_equal(run, one_device)


@pytest.mark.slow
def test_a_run_is_saved_on_four_processes_and_goes_on_on_one_device_and_back(
    one_device: Run, tmp_path: Path, gloo: Gloo
) -> None:
    printed, logs = zip(
        *gloo(4).run(printed_and_log, tmp_path, "--mesh 2x2 --until 2"), strict=True
    )
    assert [text[:7] for text in printed] == ["step 2 ", "", "", ""]
    log = logs[0]
    rest, grads = train("plain", tmp_path, f"{EXACT} --resume")
    assert_equal((log + rest, grads), one_device)

    log, _ = train("plain", tmp_path, f"{EXACT} --until 2")
    for rest, grads in gloo(2).run(train, "parallel", tmp_path, f"{EXACT} --mesh 1x2 --resume"):
        assert_equal((log + rest, grads), one_device)


def test_bf16_differs_by_its_rounding(tmp_path: Path) -> None:
    """bf16 has 8 bits; losses near log(256) are means of 512 targets, taken in float32."""
    runs = [train(script, tmp_path, "--until 1")[0] for script in ("plain", "parallel")]
    assert runs[0][0]["loss"] == pytest.approx(runs[1][0]["loss"], rel=1e-3)
    assert runs[0][0]["loss"] != runs[1][0]["loss"], "the ranks add in another order"


def changes() -> str:
    """Returns the diff of the two scripts below their docstrings."""
    folder = REPO / "examples/nanogpt"
    texts = [(folder / f"{name}.py").read_text() for name in ("plain", "parallel")]
    before, after = (text.split('"""', 2)[2].splitlines() for text in texts)
    lines = [*difflib.unified_diff(before, after, lineterm="", n=1)][2:]
    return "\n".join("" if line == " " else re.sub("^@@.*", "@@", line) for line in lines)


def test_the_page_shows_the_diff_which_has_26_lines() -> None:
    page = (REPO / "docs/nanogpt.md").read_text()
    shown = re.findall(r"^```diff\n(.*?)\n```", page, re.MULTILINE | re.DOTALL)
    assert shown == [changes()]
    assert sum(bool(re.match(r"\+.", line)) for line in shown[0].splitlines()) == 26

"""A check that takes long tells where it is, and nothing else does."""

import time
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, assume_constant, make_mesh, shard_map
from shardmap_torch.core import progress

MESH = make_mesh((2,), ("tp",), kind="abstract")
HEARD: list[str] = assume_constant([])


def wait_for(words: str) -> None:
    """Waits until a line has these words, or half a minute."""
    for _ in range(600):
        if any(words in line for line in HEARD):
            return
        time.sleep(0.05)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    monkeypatch.setattr(progress, "PATIENCE", 0.05)
    monkeypatch.setattr(progress, "_AGAIN", 0.05)
    monkeypatch.setattr(progress.LOGGER, "warning", lambda text, *of: HEARD.append(text % of))
    HEARD.clear()
    yield
    HEARD.clear()


def slow(x: Tensor) -> Tensor:
    y = x.sin()
    wait_for("time.sleep(0.05)")
    return y


@pytest.mark.usefixtures("impatient")
def test_a_long_check_tells_the_line_at_which_it_is_and_its_time() -> None:
    shard_map(slow, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"))(torch.ones(2))
    place = f"test_progress.py:{wait_for.__code__.co_firstlineno + 5}: time.sleep(0.05)"
    assert any(line.endswith(f" s so far, at {place}") for line in HEARD)
    assert all(line.startswith("checking slow") for line in HEARD)
    assert " took " in HEARD[-1]


@pytest.mark.usefixtures("impatient")
def test_the_stage_of_a_global_check_is_named() -> None:
    stage = "so far, recording the program of one device, at test_progress.py:"

    def body(x: Tensor) -> Tensor:
        wait_for(stage)
        return x

    f = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check="global")
    f(torch.ones(2))
    assert any(stage in line for line in HEARD)


@pytest.mark.usefixtures("impatient")
def test_the_step_that_layouts_do_not_prove_is_named_while_numbers_are_tried() -> None:
    why = "because body: check='global': searchsorted is not what it is on one device"

    def body(x: Tensor) -> Tensor:
        time.sleep(0 if any(why in line for line in HEARD) else 0.06)
        return torch.searchsorted(x.sort()[0], x)

    f = shard_map(body, mesh=MESH, in_specs=P("tp"), out_specs=P("tp"), check="global")
    f(torch.randn(2, 4))
    assert any(f"trying it with random numbers {why}" in line for line in HEARD)


@pytest.mark.parametrize(("variable", "value"), [(progress.VARIABLE, "0"), ("RANK", "1")])
@pytest.mark.usefixtures("impatient")
def test_nobody_tells_who_is_told_to_be_silent_or_is_another_rank(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    with progress.telling("checking", "f"):
        time.sleep(0.2)
    assert HEARD == []


def test_a_short_check_says_nothing_and_lines_go_to_stderr(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(progress.VARIABLE, raising=False)
    with progress.telling("checking", "f"):
        pass
    assert capsys.readouterr().err == ""
    progress.LOGGER.warning("a line")
    assert capsys.readouterr().err == "a line\n"

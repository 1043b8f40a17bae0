"""Figures of hardware are positive, sourced, and read from files with every mistake named."""

from pathlib import Path

import pytest
import torch

from shardmap_torch import SpecError, make_mesh
from shardmap_torch.planning import A100, B200, H100, H200, Hardware, read_hardware, this_machine
from shardmap_torch.planning.dry_run import Step
from shardmap_torch.planning.hardware import ranks_per_host
from tests.support.golden import hold_own


@pytest.mark.parametrize("hardware", [A100, H100, H200, B200], ids=lambda each: each.name)
def test_known_hardware_has_figures_and_their_source(hardware: Hardware) -> None:
    assert hardware.flops[torch.bfloat16] > hardware.flops[torch.float32] > 0
    assert hardware.inside > hardware.between > 0
    assert "NVIDIA" in hardware.source


def test_ranks_of_a_host_are_neighbours() -> None:
    mesh = make_mesh((2, 4, 4), ("pp", "dp", "tp"), kind="abstract")
    found = {axes: ranks_per_host(mesh, axes, 8) for axes in (("tp",), ("dp",), ("dp", "tp"))}
    assert found == {("tp",): 4, ("dp",): 2, ("dp", "tp"): 8}
    assert ranks_per_host(mesh, ("pp",), 8) == 1


def test_a_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\nmemory = 8e9\nbandwidth = 1e12\n[flops]\nbfloat16 = 1e14\n')
    assert read_hardware(path) == Hardware("x", {torch.bfloat16: 1e14}, 8e9, 1e12)


def test_every_mistake_of_a_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text('name = "x"\nmemory = -1\nspeed = 1\n[flops]\nbf16 = 1e14\n')
    with pytest.raises(SpecError) as error:
        read_hardware(path)
    hold_own(str(error.value))
    path.write_text("name = ")
    with pytest.raises(SpecError, match=r"^read_hardware: .* is no TOML file: Invalid value"):
        read_hardware(path)


@pytest.mark.fuzz  # layers are checked and timed
def test_this_machine_computes_and_copies() -> None:
    found = this_machine()
    assert found.flops[torch.float32] > 1e8
    assert found.bandwidth > 1e8
    assert 0 < found.framing < 1e-3


def test_a_small_sum_is_a_tree_and_a_large_one_a_ring() -> None:
    device = Hardware(
        "x", {torch.float32: 1.0}, 1, 1.0, inside=10.0, between=1.0, latency=1.0, devices=8
    )  # fmt: skip
    mesh = make_mesh((8,), ("tp",), kind="abstract")
    steps = (Step("sum", None, False, sent=n, axes=("tp",), hops=14) for n in (1, 1000))
    small, large = (device.sending(step, mesh) for step in steps)
    # Up and down a tree of 8 ranks, 3 deep; 14 messages around a ring.
    assert small == pytest.approx(6 * (1 + 0.1))
    assert large == pytest.approx(14 + 100)

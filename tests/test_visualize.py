"""`visualize_sharding` shows which ranks hold which shard."""

import io
import re
from typing import Any

import pytest
import torch
from rich.console import Console
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from shardmap_torch import Mesh, P, SpecError, device_put, make_mesh, use_mesh, visualize_sharding
from tests.support.golden import told
from tests.support.pool import Gloo

MESH = make_mesh((2, 4), ("dp", "tp"), kind="simulated")


def cells(
    x: Any, mesh: Mesh | None = MESH, spec: P | None = None, width: int = 120
) -> list[list[str]]:
    """The table, header included, without its lines and without the line above it."""
    out = io.StringIO()
    console = Console(file=out, color_system=None, width=width)
    visualize_sharding(x, mesh=mesh, spec=spec, console=console)
    lines = [line for line in out.getvalue().splitlines()[1:] if "│" in line]
    return [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]


def test_a_cut_of_the_last_dim_runs_across_with_copies_in_one_cell() -> None:
    assert cells((128, 512), spec=P(None, "tp")) == [
        ["0:128", "128:256", "256:384", "384:512"],
        ["0, 4", "1, 5", "2, 6", "3, 7"],
    ]


def test_a_cut_of_another_dim_runs_down() -> None:
    assert cells((16, 65), spec=P("dp")) == [["0:8", "0, 1, 2, 3"], ["8:16", "4, 5, 6, 7"]]


def test_a_vector_runs_across() -> None:
    assert cells((8,), spec=P("dp")) == [["0:4", "4:8"], ["0, 1, 2, 3", "4, 5, 6, 7"]]


def test_two_cuts_make_a_grid() -> None:
    assert cells((4, 8), spec=P("dp", "tp")) == [
        ["", "0:2", "2:4", "4:6", "6:8"],
        ["0:2", "0", "1", "2", "3"],
        ["2:4", "4", "5", "6", "7"],
    ]


def test_in_a_narrow_terminal_ranges_are_broken_and_not_cut_off() -> None:
    assert cells((4000, 8000), spec=P("dp", "tp"), width=55) == [
        ["", "0:", "2000:", "4000:", "6000:"],
        ["", "2000", "4000", "6000", "8000"],
        ["0:2000", "0", "1", "2", "3"],
        ["2000:4000", "4", "5", "6", "7"],
    ]


def test_dims_that_are_not_cut_do_not_show() -> None:
    assert cells((3, 4, 5, 8, 7), spec=P(None, "dp", None, "tp")) == [
        ["", "0:2", "2:4", "4:6", "6:8"],
        ["0:2", "0", "1", "2", "3"],
        ["2:4", "4", "5", "6", "7"],
    ]


def test_axes_of_one_dim_stand_in_their_order() -> None:
    assert cells((8,), spec=P(("tp", "dp")))[1] == ["0", "4", "1", "5", "2", "6", "3", "7"]


def test_a_replicated_value_is_one_cell() -> None:
    assert cells((2, 2), spec=P()) == [["0, 1, 2, 3, 4, 5, 6, 7"]]
    assert cells((), spec=P()) == [["0, 1, 2, 3, 4, 5, 6, 7"]]


def test_addends_of_a_pending_sum_stand_with_plus_signs() -> None:
    assert cells((2,), spec=P(partial="tp")) == [["0 + 1 + 2 + 3, 4 + 5 + 6 + 7"]]
    assert cells((4,), spec=P("tp", partial="dp"))[1] == ["0 + 4", "1 + 5", "2 + 6", "3 + 7"]


def test_of_many_ranks_and_pieces_the_first_and_the_last_show() -> None:
    big = make_mesh((128, 64), ("dp", "tp"), kind="abstract")
    assert cells((1024,), big, P("dp")) == [
        ["0:8", "8:16", "…", "1016:1024"],
        ["0, 1, …, 63", "64, 65, …, 127", "…", "8128, 8129, …, 8191"],
    ]


def test_a_tensor_shows_as_its_shape_does() -> None:
    assert cells(torch.zeros(4, 8), spec=P("dp", "tp")) == cells((4, 8), spec=P("dp", "tp"))


def test_the_mesh_is_that_of_use_mesh() -> None:
    with use_mesh(MESH):
        assert cells((8,), None, P("tp"))[1] == ["0, 4", "1, 5", "2, 6", "3, 7"]


def test_the_line_above_names_shape_spec_and_mesh(capsys: pytest.CaptureFixture[str]) -> None:
    visualize_sharding((4, 8), mesh=MESH, spec=P("dp", "tp"))
    first = capsys.readouterr().out.splitlines()[0]
    assert first == "(4, 8) sharded by P('dp', 'tp') on simulated mesh (dp=2, tp=4)"


def test_pieces_that_touch_have_different_colors() -> None:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, color_system="standard", width=120)
    visualize_sharding((4, 8), mesh=MESH, spec=P("dp", "tp"), console=console)
    found = re.findall(r"\x1b\[1;37;(\d+)m *(\d)", out.getvalue())
    colors = {int(rank): color for color, rank in found}
    assert len(colors) == 8
    for rank in range(4):
        assert colors[rank] != colors[rank + 4]
        assert rank == 3 or colors[rank] != colors[rank + 1]


def test_a_shape_without_spec_is_rejected() -> None:
    with told(SpecError):
        visualize_sharding((4,), mesh=MESH)


def test_a_spec_that_does_not_fit_is_rejected_with_the_arithmetic() -> None:
    with told(SpecError):
        visualize_sharding((6,), mesh=MESH, spec=P("tp"))


def test_an_unknown_axis_is_rejected() -> None:
    with told(SpecError):
        visualize_sharding((6,), mesh=MESH, spec=P("pp"))


def test_what_is_no_console_is_refused() -> None:
    junk: Any = []
    with pytest.raises(SpecError) as error:
        visualize_sharding((8,), mesh=MESH, spec=P("tp"), console=junk)
    assert str(error.value) == "visualize_sharding: console=[] is no console of rich."


def test_three_cuts_are_rejected() -> None:
    mesh = make_mesh((2, 2, 2), ("x", "y", "z"), kind="simulated")
    with told(SpecError):
        visualize_sharding((2, 2, 2), mesh=mesh, spec=P("x", "y", "z"))


def show_dtensors() -> list[list[list[str]]]:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    assert mesh.device_mesh is not None
    x = torch.zeros(4, 8)
    pending = DTensor.from_local(x, mesh.device_mesh, [Partial(), Replicate()])
    sharded = DTensor.from_local(x, mesh.device_mesh, [Shard(1), Shard(0)])
    reordered = device_put(torch.zeros(4), mesh, P(("tp", "dp")))
    return [cells(value, None) for value in (pending, sharded, reordered)]


def show_strided() -> str:
    mesh = make_mesh((2, 2), ("dp", "tp")).device_mesh
    assert mesh is not None
    placements = [_StridedShard(0, split_factor=4), Shard(0)]
    x = DTensor.from_local(torch.zeros(4), mesh, placements, run_check=False)
    with pytest.raises(SpecError) as error:
        visualize_sharding(x)
    return str(error.value)


def test_a_placement_that_no_spec_can_say_is_rejected(gloo: Gloo) -> None:
    for text in gloo(4).run(show_strided):
        assert text == "visualize_sharding: cannot show the placement _S(0, 4)."


def test_a_dtensor_shows_as_it_lies_on_every_rank(gloo: Gloo) -> None:
    for pending, sharded, reordered in gloo(4).run(show_dtensors):
        assert pending == [["0 + 2, 1 + 3"]]
        assert sharded == [["", "0:8", "8:16"], ["0:4", "0", "2"], ["4:8", "1", "3"]]
        assert reordered[1] == ["0", "2", "1", "3"]

"""Meshes: layout, names, and what is wrong with a bad one."""

import threading
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from shardmap_torch import Mesh, MeshError, current_mesh, make_mesh, use_mesh
from shardmap_torch.control.groups import TORCHRUN_VARIABLES
from shardmap_torch.mesh import as_mesh
from tests.support.golden import told
from tests.support.pool import GLOO_TIMEOUT, Gloo

MESHES = st.lists(st.integers(1, 4), min_size=1, max_size=3).map(
    lambda sizes: make_mesh(sizes, ("a", "b", "c")[: len(sizes)], kind="simulated")
)


@given(MESHES)
def test_ranks_and_coordinates_are_inverse_and_row_major(mesh: Mesh) -> None:
    places = [mesh.coordinates(rank) for rank in range(mesh.size)]
    assert [mesh.rank_at(place) for place in places] == list(range(mesh.size))
    assert places == sorted(places, key=lambda place: tuple(place.values()))
    assert [mesh.index(mesh.axis_names, place) for place in places] == list(range(mesh.size))


@given(MESHES, st.data())
def test_peers_differ_along_their_axes_only_in_the_order_of_the_index(
    mesh: Mesh, data: st.DataObject
) -> None:
    order = data.draw(st.permutations(mesh.axis_names))
    axes = order[: data.draw(st.integers(1, len(order)))]
    place = mesh.coordinates(data.draw(st.integers(0, mesh.size - 1)))
    peers = mesh.peers(axes, place)
    assert len(set(peers)) == mesh.num_ranks(axes)
    for index, peer in enumerate(peers):
        there = mesh.coordinates(peer)
        assert mesh.index(axes, there) == index
        assert all(there[axis] == place[axis] for axis in mesh.axis_names if axis not in axes)


def test_meshes_of_one_layout_are_equal_and_print_their_sizes() -> None:
    one, two = (make_mesh((2, 4), ("dp", "tp"), kind="simulated") for _ in range(2))
    assert one == two
    assert hash(one) == hash(two)
    assert one != make_mesh((4, 2), ("dp", "tp"), kind="simulated")
    assert str(one) == "simulated mesh (dp=2, tp=4)"
    assert one.size == 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: make_mesh((2,), "tp"),
        lambda: make_mesh((2,)),
        lambda: make_mesh((2, 2), ("tp",)),
        lambda: make_mesh((), ()),
        lambda: make_mesh((2, 2), ("tp", "tp")),
        lambda: make_mesh((2,), ("",)),
        lambda: make_mesh((2, 2), ("tp", 1)),  # type: ignore[arg-type]
        lambda: make_mesh((0, 2), ("dp", "tp")),
        lambda: make_mesh((2.0,), ("tp",)),  # type: ignore[arg-type]
        lambda: make_mesh(2, ("tp",)),  # type: ignore[arg-type]
        lambda: make_mesh((2,), ("tp",), kind="real"),  # type: ignore[arg-type]
        lambda: make_mesh((2,), ("tp",), simulate="threads"),  # type: ignore[arg-type]
        lambda: as_mesh("tp"),  # type: ignore[arg-type]
        lambda: make_mesh((2,), ("tp",), kind="simulated").group(("tp",)),
        lambda: make_mesh((2,), ("tp",), kind="process_group"),
    ],
)
def test_a_bad_mesh_is_refused(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TORCHRUN_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    with told(MeshError):
        make()


def test_without_process_groups_a_mesh_is_simulated(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TORCHRUN_VARIABLES:
        monkeypatch.delenv(variable, raising=False)
    assert make_mesh((2,), ("tp",)).kind == "simulated"


def test_part_of_the_environment_of_torchrun_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in TORCHRUN_VARIABLES:
        monkeypatch.setenv(variable, "0")
    monkeypatch.delenv("MASTER_ADDR")
    with pytest.raises(MeshError, match=r"environment lacks MASTER_ADDR\. Start"):
        make_mesh((1,), ("tp",), kind="process_group")


def test_a_torch_without_distributed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "is_available", lambda: False)
    with pytest.raises(MeshError) as caught:
        make_mesh((1,), ("tp",), kind="process_group")
    assert str(caught.value) == ("A process_group mesh needs a torch built with torch.distributed.")


def test_use_mesh_nests_and_ends_when_the_block_raises() -> None:
    one, two = (make_mesh((n,), ("tp",), kind="simulated") for n in (1, 2))
    with use_mesh(one):
        with pytest.raises(MeshError), use_mesh(two):
            make_mesh((), ())
        assert current_mesh() is one
    assert current_mesh() is None


def test_use_mesh_holds_on_its_own_thread_only() -> None:
    seen: list[Mesh | None] = []
    with use_mesh(make_mesh((1,), ("tp",), kind="simulated")):
        thread = threading.Thread(target=lambda: seen.append(current_mesh()))
        thread.start()
        thread.join()
    assert seen == [None]


def of_processes() -> None:
    mesh = make_mesh((2,), ("tp",))
    assert str(mesh) == "process_group mesh (tp=2)"
    assert dist.get_process_group_ranks(mesh.group(("tp",))) == [0, 1]
    kernels = mesh.group(("tp",), "kernels")
    assert kernels is not mesh.group(("tp",))
    options: Any = kernels._get_backend(torch.device("cpu")).options
    assert options._timeout == GLOO_TIMEOUT  # The world's, not torch's 30 minutes.
    with pytest.raises(MeshError) as wrong_size:
        make_mesh((2, 2), ("dp", "tp"))
    assert str(wrong_size.value) == (
        "The mesh {'dp': 2, 'tp': 2} has 2*2 = 4 ranks, but 2 processes were started.\n"
        "Fix: torchrun --nproc-per-node 4 on one host, or sizes whose product is 2."
    )
    torchs = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    assert make_mesh(torchs) == mesh
    assert as_mesh(torchs) is as_mesh(torchs)
    own = as_mesh(init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))["tp"])
    assert (own.shape, own.rank, own.processes) == ({"tp": 1}, 0, (dist.get_rank(),))
    first = DeviceMesh("cpu", [0], mesh_dim_names=("tp",))
    if dist.get_rank() == 1:
        with pytest.raises(MeshError) as missing:
            make_mesh(first)
        assert str(missing.value) == "The DeviceMesh has the processes [0], not 1."
    else:
        assert make_mesh(first).size == 1
    with pytest.raises(MeshError) as unnamed:
        make_mesh(init_device_mesh("cpu", (2,)))
    assert str(unnamed.value) == (
        "The DeviceMesh has no dim names; make it with mesh_dim_names=(...)."
    )
    reversed_ranks = DeviceMesh("cpu", [1, 0], mesh_dim_names=("tp",))
    with pytest.raises(MeshError) as out_of_order:
        make_mesh(reversed_ranks)
    assert str(out_of_order.value) == ("The DeviceMesh's ranks [1, 0] are not in row-major order.")
    with pytest.raises(MeshError) as renamed:
        make_mesh(torchs, ("dp",))
    assert str(renamed.value) == "axis_names ('dp',) differ from the DeviceMesh's ('tp',)."


def test_a_mesh_of_processes(gloo: Gloo) -> None:
    gloo(2).run(of_processes)


def makes_groups_after_one_of_its_own() -> list[float]:
    """Makes groups of all ranks, of some, and of one axis, where rank 0 has made more groups."""
    DeviceMesh("cpu", [0], mesh_dim_names=("alone",))
    if dist.get_rank() == 0:
        dist.new_group([0], use_local_synchronization=True)
    sums = []
    for _ in range(2):
        with make_mesh((1, 2, 2), ("a", "b", "c"), timeout=10) as mesh:
            for axes in (("b",), ("a", "b"), ("a", "c"), ("b", "c")):
                x = torch.tensor(float(dist.get_rank()))
                dist.all_reduce(x, group=mesh.group(axes))
                sums.append(x.item())
    return sums


def test_groups_are_made_where_one_rank_has_made_more_than_others(gloo: Gloo) -> None:
    expected = [[2.0, 2.0, 1.0, 6.0], [4.0, 4.0, 1.0, 6.0], [2.0, 2.0, 5.0, 6.0]]
    assert gloo(4).run(makes_groups_after_one_of_its_own) == [
        each * 2 for each in (*expected, [4.0, 4.0, 5.0, 6.0])
    ]

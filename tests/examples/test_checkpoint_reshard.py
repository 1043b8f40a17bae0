"""State saved on one mesh loads bit-equal on others, and training goes on as if never stopped."""

from pathlib import Path

import optree
import pytest
import torch
from torch.distributed.tensor import DTensor

from examples import checkpoint_reshard
from examples.checkpoint_reshard import State, init, specs, train
from shardmap_torch import Mesh, device_put, full, make_mesh
from shardmap_torch.saving import load, save
from tests.support.pool import Gloo

AXES = ("dp", "tp")
STEPS = 2


def train_and_save(sizes: tuple[int, int], folder: Path) -> State:
    """Returns the whole state as it was saved."""
    mesh = make_mesh(sizes, AXES)
    state, _ = train(device_put(init(), mesh, specs()), mesh, STEPS)
    save(state, folder, STEPS)
    return full(state)


def load_on(mesh: Mesh, folder: Path) -> State:
    return load(device_put(init(), mesh, specs()), folder)


def load_whole(sizes: tuple[int, int], folder: Path) -> tuple[State, int]:
    """The whole state as it was read, and how many of its leaves are sharded."""
    state = load_on(make_mesh(sizes, AXES), folder)
    leaves = optree.tree_leaves(state)
    return full(state), sum(isinstance(leaf, DTensor) for leaf in leaves)


def resume(sizes: tuple[int, int], folder: Path) -> list[float]:
    mesh = make_mesh(sizes, AXES)
    return train(load_on(mesh, folder), mesh, STEPS)[1]


def assert_bit_equal(actual: State, expected: State) -> None:
    assert optree.tree_paths(actual) == optree.tree_paths(expected)
    assert optree.tree_all(optree.tree_map(torch.equal, actual, expected))


@pytest.fixture(scope="module")
def saved(gloo: Gloo, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, State]:
    """A checkpoint of a 2x2 mesh, and the state that it holds."""
    folder = tmp_path_factory.mktemp("checkpoint")
    return folder, gloo(4).run(train_and_save, (2, 2), folder)[0]


def test_the_saved_state_has_been_trained(saved: tuple[Path, State]) -> None:
    _, state = saved
    assert state["optimizer"]["step"] == STEPS
    assert not state["params"]["layers"][0]["qkv"].equal(init()["params"]["layers"][0]["qkv"])


@pytest.mark.parametrize("sizes", [(2, 2), (1, 4), (4, 1), (1, 2)])
def test_state_of_a_2x2_mesh_loads_bit_equal_on_processes(
    gloo: Gloo, saved: tuple[Path, State], sizes: tuple[int, int]
) -> None:
    folder, expected = saved
    num_matrices = 2 + 4 * checkpoint_reshard.CONFIG.layers
    for actual, num_sharded in gloo(sizes[0] * sizes[1]).run(load_whole, sizes, folder):
        assert_bit_equal(actual, expected)
        assert num_sharded == 3 * num_matrices  # each with its two moments


def test_state_of_a_2x2_mesh_loads_bit_equal_on_one_device(saved: tuple[Path, State]) -> None:
    folder, expected = saved
    actual, num_sharded = load_whole((1, 1), folder)
    assert_bit_equal(actual, expected)
    assert num_sharded == 0


def test_training_resumed_on_another_mesh_has_the_losses_of_training_that_never_stopped(
    gloo: Gloo, saved: tuple[Path, State]
) -> None:
    folder, _ = saved
    mesh = make_mesh((1, 1), AXES)
    _, losses = train(init(), mesh, 2 * STEPS)
    # float32, four steps of a few hundred sums in another order.
    for resumed in gloo(4).run(resume, (1, 4), folder):
        assert resumed == pytest.approx(losses[STEPS:], rel=1e-5)


def test_the_script_goes_on_where_it_stopped(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for sizes in ("2x2", "1x4"):
        checkpoint_reshard.main(["--mesh", sizes, "--steps", "1", "--folder", str(tmp_path)])
        (tmp_path / "step-000000009.unfinished-ab12").mkdir()  # As a kill in a save leaves it.
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("simulated mesh (dp=2, tp=2) step 1 loss ")
    assert second.startswith("simulated mesh (dp=1, tp=4) step 2 loss ")

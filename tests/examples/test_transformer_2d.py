"""The 2-D transformer layer equals its single-device version on every mesh of three axes."""

from typing import Any

import pytest
import torch
from torch import Tensor

from examples import transformer_2d
from examples.transformer_2d import AXES, Sizes, example, outputs_and_grads
from shardmap_torch import make_mesh
from tests.support.pool import Gloo

# No two sizes alike, so that exchanged dims cannot hide.
SIZES = Sizes(batch=4, time=6, embed=24, heads=16, query=2, hidden=5)


def on_mesh(
    sizes: tuple[int, int, int], strategy: Any = "auto"
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """In a worker of the pool a process-group mesh, else a simulated one."""
    mesh = make_mesh(sizes, AXES, simulate=strategy)
    outputs, grads = outputs_and_grads(*example(SIZES), mesh)
    return {name: value.detach() for name, value in outputs.items()}, grads


def assert_equals_one_device(actual: tuple[dict[str, Tensor], dict[str, Tensor]]) -> None:
    # The ranks add the same float64 numbers in another order.
    expected = outputs_and_grads(*example(SIZES), None)
    torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-10)


@pytest.mark.sample(3)
@pytest.mark.parametrize("strategy", ["auto", "vmap", "ranks"])
@pytest.mark.parametrize("sizes", [(2, 2, 2), (4, 1, 2)])
def test_the_layer_on_a_simulated_mesh_is_that_of_one_device(
    sizes: tuple[int, int, int], strategy: str
) -> None:
    assert_equals_one_device(on_mesh(sizes, strategy))


@pytest.mark.sample(1)
@pytest.mark.parametrize("sizes", [(1, 2, 2), (2, 1, 2), (2, 2, 1)])
def test_the_layer_on_processes_is_that_of_one_device(
    gloo: Gloo, sizes: tuple[int, int, int]
) -> None:
    for actual in gloo(4).run(on_mesh, sizes):
        assert_equals_one_device(actual)


def test_the_script_shows_that_all_is_equal(capsys: pytest.CaptureFixture[str]) -> None:
    transformer_2d.main()
    shown = capsys.readouterr().out
    assert "(8, 16, 16) sharded by P(('y', 'z'), 'x') on simulated mesh (x=2, y=2, z=2)" in shown
    for line in ("output out", "output keys", "output values", "gradient of q_wi", "gradient of x"):
        assert f"{line} equals one device's up to" in shown

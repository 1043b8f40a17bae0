"""Programs that depend on a rank's positions, ids and maxima, on gloo processes."""

from importlib import import_module
from typing import Final

import pytest
import torch
from torch import Tensor

from tests.checker.support.one_device import AXES, ONE, outcome_on
from tests.programs.support.harness import worker_mesh
from tests.support.fuzzing import sized
from tests.support.pool import Gloo

MODULES: Final = ("test_positions", "test_maxima", "test_vocabulary")


def outcomes(module: str, names: list[str], shape: tuple[int, int]) -> dict[str, list[Tensor]]:
    """Returns what this process gets of the right programs of a test."""
    right = import_module(f"tests.checker.spmd.{module}").RIGHT
    mesh = worker_mesh(shape, AXES) if shape != (1, 1) else ONE
    return {name: outcome_on(mesh, *right[name]) for name in names}


@pytest.mark.parametrize("module", MODULES)
def test_processes_give_the_values_and_gradients_of_one_device(module: str, gloo: Gloo) -> None:
    right = import_module(f"tests.checker.spmd.{module}").RIGHT
    names = [*right][:: sized(4, 1)]
    expected = outcomes(module, names, (1, 1))
    for size, shape in sized({2: (2, 1)}, {2: (2, 1), 4: (2, 2)}).items():
        for found in gloo(size).run(outcomes, module, names, shape):
            for name in names:
                for actual, wanted in zip(found[name], expected[name], strict=True):
                    torch.testing.assert_close(actual, wanted, msg=name)

"""Layers on 8 processes, of which 2 or 4 share an axis, equal one device."""

import importlib
from collections.abc import Mapping
from math import prod

import pytest
from torch import Tensor

from shardmap_torch import make_mesh
from tests.nn.support.cases import AXES, Case, assert_close, expected, on_mesh
from tests.support.pool import Gloo

MODULES = (
    "test_dropless",
    "test_attention",
    "test_budget",
    "test_cache",
    "test_context",
    "test_embedding",
    "test_fsdp",
    "test_linear",
    "test_loss",
    "test_moe",
    "test_norm",
    "test_other_models",
    "test_rotary",
)
SIZE = 8


def cases_of(module: str) -> Mapping[str, Case]:
    found: Mapping[str, Case] = importlib.import_module(f"tests.nn.{module}").CASES
    return found


def sizes_for(case: Case) -> tuple[int, int, int]:
    """Chooses as many ranks of "dp" as divide the batches; what is left of the 8 repeats them."""
    tp = case.sizes[1]
    dp = next(n for n in (4, 2, 1) if n * tp <= SIZE and _divides(case, {"dp": n, "tp": tp}))
    return SIZE // (tp * dp), dp, tp


def _divides(case: Case, sizes: Mapping[str, int]) -> bool:
    return all(
        x.shape[dim] % prod(sizes[axis] for axis in axes) == 0
        for x, spec in zip(case.inputs, case.in_specs, strict=True)
        for dim, axes in spec.sharded_dims
    )


def in_worker(module: str) -> dict[str, list[Tensor]]:
    return {
        name: on_mesh(case, make_mesh(sizes_for(case), ("rest", *AXES)))
        for name, case in cases_of(module).items()
    }


@pytest.mark.fuzz
@pytest.mark.parametrize("module", MODULES)
def test_values_and_gradients_are_those_of_one_device(module: str, gloo: Gloo) -> None:
    for found in gloo(SIZE).run(in_worker, module, timeout=300):
        for name, case in cases_of(module).items():
            assert_close(found[name], expected(case))

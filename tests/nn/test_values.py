"""Layers on simulated ranks and on processes equal one device: the cases of all modules."""

import importlib
from collections.abc import Iterator, Mapping
from math import prod
from typing import Any, Final

import pytest
from torch import Tensor

from shardmap_torch import make_mesh
from tests.nn.support.cases import (
    AXES,
    Case,
    assert_close,
    assert_equal_on_processes,
    assert_equals_one_device,
    expected,
    on_mesh,
)
from tests.support.pool import Gloo

MODULES: Final = (
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
    "test_rotary",
    "support.other_models",
)
# Models and counts of layers that other modules run so: only `make fuzz` runs these.
IN_FUZZ: Final = {"support.other_models": ("ranks", "processes"), "test_budget": ("processes",)}

# One batched program cannot exchange unlike numbers of rows.
STRATEGIES: Final = {"test_dropless": ("ranks", "auto")}

SIZE: Final = 8


def cases_of(module: str) -> Mapping[str, Case]:
    found: Mapping[str, Case] = importlib.import_module(f"tests.nn.{module}").CASES
    return found


def marks_of(module: str, way: str) -> tuple[pytest.MarkDecorator, ...]:
    return (pytest.mark.fuzz,) if way in IN_FUZZ.get(module, ()) else ()


def simulated() -> Iterator[Any]:
    for module in MODULES:
        ways = STRATEGIES.get(module, ("vmap", "ranks"))
        for number, (name, case) in enumerate(cases_of(module).items()):
            for way in ways:
                if not name.startswith("overlapped"):  # which processes alone do
                    label = f"{module.removeprefix('test_')}: {name}, {way}"
                    # `make test` runs each case in one way, in turn.
                    is_turn = way == ways[number % len(ways)]
                    marks = marks_of(module, way) if is_turn else (pytest.mark.fuzz,)
                    yield pytest.param(case, way, id=label, marks=marks)


@pytest.mark.parametrize(("case", "simulate"), list(simulated()))
def test_on_simulated_ranks_values_and_gradients_are_those_of_one_device(
    case: Case, simulate: str
) -> None:
    assert_equals_one_device(case, simulate)


@pytest.mark.sample(6, "test_linear", "test_context", "test_fsdp")  # which overlap, or send pairs
@pytest.mark.parametrize(
    "module", [pytest.param(each, marks=marks_of(each, "processes")) for each in MODULES]
)
def test_on_processes_values_and_gradients_are_those_of_one_device(module: str, gloo: Gloo) -> None:
    assert_equal_on_processes(cases_of(module), f"tests.nn.{module}", gloo)


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
def test_on_8_processes_they_are_too(module: str, gloo: Gloo) -> None:
    for found in gloo(SIZE).run(in_worker, module, timeout=300):
        for name, case in cases_of(module).items():
            assert_close(found[name], expected(case))

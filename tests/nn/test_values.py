"""Layers on simulated ranks and on processes equal one device: the cases of all modules."""

import importlib
from collections.abc import Iterator, Mapping
from typing import Any, Final

import pytest

from tests.nn.support.cases import Case, assert_equal_on_processes, assert_equals_one_device
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

# One batched program cannot exchange unlike numbers of rows, and has no Functions, as rings are.
STRATEGIES: Final = dict.fromkeys(("test_dropless", "test_context"), ("ranks", "auto"))


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


@pytest.mark.sample(4, "test_linear", "test_context", "test_fsdp")  # which overlap, or send pairs
@pytest.mark.parametrize(
    "module", [pytest.param(each, marks=marks_of(each, "processes")) for each in MODULES]
)
def test_on_processes_values_and_gradients_are_those_of_one_device(module: str, gloo: Gloo) -> None:
    assert_equal_on_processes(cases_of(module), f"tests.nn.{module}", gloo)

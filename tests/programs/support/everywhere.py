"""Runs one scenario, a function that takes a mesh and asserts, on every kind of mesh."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import Mesh, make_mesh, shard_map
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.pool import Gloo


def unchecked(f: Callable[..., Any] | None = None, /, **kwargs: Any) -> Callable[..., Any]:
    """`shard_map` without the type checker, but where one batched program runs all ranks."""
    check = getattr(kwargs.get("mesh"), "simulate", "") == "vmap"
    mapped: Callable[..., Any] = shard_map(f, **{"check": check, **kwargs})
    return mapped


Scenario = Callable[[Mesh], None]

KINDS = ["vmap", "ranks", pytest.param("gloo", marks=pytest.mark.slow)]
ON_EVERY_MESH = pytest.mark.parametrize("kind", KINDS)
ON_PROCESSES_OR_VMAP = pytest.mark.parametrize("kind", [KINDS[0], KINDS[2]])
ON_REAL_RANKS = pytest.mark.parametrize("kind", KINDS[1:])
SIMULATED = pytest.mark.parametrize("kind", KINDS[:2])


def run_on(
    kind: Any, scenario: Scenario, gloo: Gloo, shape: Sequence[int] = (2,), names: Any = ("tp",)
) -> None:
    """Runs `scenario` on a simulated mesh, or on every process of the pool."""
    if kind == "gloo":
        size = 1
        for length in shape:
            size *= length
        # Four processes that each try a program with numbers took 52 s of two slow cores.
        gloo(size).run(_in_worker, scenario, tuple(shape), tuple(names), timeout=90)
    else:
        scenario(make_mesh(shape, names, kind="simulated", simulate=kind))


def claimed(
    claims: Mapping[str, Scenario], shape: Sequence[int] = (2,), names: Any = ("tp",)
) -> Callable[..., None]:
    """Makes a test of scenarios, by what they claim, on every kind of mesh."""

    @ON_EVERY_MESH
    @pytest.mark.parametrize("claim", claims)
    def test(claim: str, kind: str, gloo: Gloo) -> None:
        run_on(kind, claims[claim], gloo, shape, names)

    return test


def _in_worker(scenario: Scenario, shape: tuple[int, ...], names: tuple[str, ...]) -> None:
    scenario(worker_mesh(shape, names))


def same(actual: Any, expected: Any) -> None:
    """Compares two tensors, or tuples of them, by their global values, to 1e-10."""
    actual, expected = _several(actual), _several(expected)
    assert len(actual) == len(expected)
    for one, other in zip(actual, expected, strict=True):
        torch.testing.assert_close(global_value(one), other.detach(), rtol=1e-10, atol=1e-10)


def _several(values: Any) -> list[Tensor]:
    return [values] if isinstance(values, Tensor) else list(values)

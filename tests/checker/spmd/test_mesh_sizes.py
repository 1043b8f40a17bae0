"""Sizes that a body asks its mesh for, and the program on one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    OneDeviceWarning,
    P,
    ShardTypeError,
    all_reduce,
    device_put,
    make_mesh,
    shard_map,
)
from tests.programs.support.harness import worker_mesh
from tests.support.pool import Gloo

MESH: Final = make_mesh((2,), ("dp",), kind="simulated")
SPECS: Final[Any] = {"in_specs": P("dp"), "out_specs": P()}
X: Final = torch.randn(4, 6, dtype=torch.float64)

Body = Callable[[Tensor], Tensor]


def mean(x: Tensor) -> Any:
    return all_reduce(x.mean(0), "dp", op="mean", dst=I)


def total(x: Tensor) -> Any:
    return all_reduce(x, "dp", dst=I)


TWICE: Final[list[Body]] = [
    lambda x: mean(x) / MESH.shape["dp"],
    lambda x: mean(x).div_(MESH.size),
    lambda x: torch.div(mean(x), other=MESH.size),
    lambda x: torch._foreach_div([mean(x)], MESH.size)[0],
    lambda x: mean(x) * (1 / MESH.size),
    lambda x: mean(x).mul(MESH.shape["dp"]),
]


@pytest.mark.parametrize("body", TWICE)
def test_a_mean_that_is_divided_once_more_is_none_on_one_device(body: Body) -> None:
    with pytest.raises(ShardTypeError, match=r"times that value, because of|scalar is 2 on a"):
        shard_map(body, mesh=MESH, **SPECS, check="global")(X)
    with pytest.warns(OneDeviceWarning):
        shard_map(body, mesh=MESH, **SPECS)(X)


def refused_on_processes() -> None:
    mesh = worker_mesh((2,), ("dp",))
    body = shard_map(lambda x: mean(x) / mesh.shape["dp"], mesh=mesh, **SPECS, check="global")
    with pytest.raises(ShardTypeError, match="it is 1/2 times that value, because of"):
        body(device_put(torch.ones(4, 6), mesh, P("dp")))


@pytest.mark.slow
def test_it_is_none_on_processes_either(gloo: Gloo) -> None:
    gloo(2).run(refused_on_processes)


RIGHT: Final[list[tuple[Body, int]]] = [
    (lambda x: total(x.mean(0)) / MESH.size if MESH.size > 1 else x.mean(0), 1),
    (lambda x: mean(sum((x * i for i in range(1, MESH.size + 1)), 0 * x)), 3),
    (lambda x: mean(x.view(-1, MESH.shape["dp"], 3)).flatten(), 1),
]


@pytest.mark.parametrize(("body", "times"), RIGHT)
def test_loops_shapes_and_branches_go_by_the_numbers_of_the_ranks(body: Body, times: int) -> None:
    found = shard_map(body, mesh=MESH, **SPECS, check="global")(X)
    torch.testing.assert_close(found, times * X.mean(0))

"""Sizes that a body asks its mesh for, and the program on one device."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, OneDeviceWarning, P, ShardTypeError, all_reduce, make_mesh, shard_map

MESH: Final = make_mesh((2,), ("dp",), kind="simulated")
X: Final = torch.randn(4, 6, dtype=torch.float64)

Body = Callable[[Tensor], Tensor]


def mean(x: Tensor) -> Tensor:
    found: Tensor = all_reduce(x.mean(0), "dp", op="mean", dst=I)
    return found


def total(x: Tensor) -> Tensor:
    found: Tensor = all_reduce(x, "dp", dst=I)
    return found


TWICE: Final[list[Body]] = [
    lambda x: mean(x) / MESH.shape["dp"],
    lambda x: mean(x).div_(MESH.size),
    lambda x: torch.div(mean(x), MESH.size),
    lambda x: mean(x) * (1 / MESH.size),
    lambda x: mean(x).mul(MESH.shape["dp"]),
]


@pytest.mark.parametrize("body", TWICE)
def test_a_mean_that_is_divided_once_more_is_none_on_one_device(body: Body) -> None:
    with pytest.raises(ShardTypeError, match="times that value, because of"):
        shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P(), check="global")(X)
    with pytest.warns(OneDeviceWarning):
        shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P())(X)


def branched(x: Tensor) -> Tensor:
    y = x.mean(0)
    return total(y) / MESH.size if MESH.size > 1 else y


def looped(x: Tensor) -> Tensor:
    return mean(sum((x * i for i in range(1, MESH.size + 1)), torch.zeros_like(x)))


def reshaped(x: Tensor) -> Tensor:
    return mean(x.view(-1, MESH.shape["dp"], 3)).flatten()


@pytest.mark.parametrize(("body", "times"), [(branched, 1), (looped, 3), (reshaped, 1)])
def test_loops_shapes_and_branches_go_by_the_numbers_of_the_ranks(body: Body, times: int) -> None:
    found = shard_map(body, mesh=MESH, in_specs=P("dp"), out_specs=P(), check="global")(X)
    torch.testing.assert_close(found, times * X.mean(0))

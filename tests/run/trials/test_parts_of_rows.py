"""Loops over microbatches that slice a sharded dim: the right one passes, a wrong mean is named."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, ShardTypeError, all_reduce, make_mesh, shard_map
from tests.support.golden import hold

torch.manual_seed(0)
ARGS: tuple[Any, ...] = (
    torch.randn(8, 5).double(),
    torch.rand(8).double() + 0.1,
    torch.randn(5, 3).double(),
)


def mapped(mode: str) -> Any:
    def step(x: Tensor, m: Tensor, w: Tensor) -> Tensor:
        w, total, n = w.detach().requires_grad_(), torch.zeros_like(w), x.shape[0] // 2
        count = all_reduce(m.sum(), "dp", dst=I)
        for i in range(2):
            a, b = x[i * n : (i + 1) * n], m[i * n : (i + 1) * n]
            loss = ((a @ w).square().sum(-1) * b).sum()
            loss = loss / (b.sum() * 2) if mode == "mean of means" else loss / count
            total = total + torch.autograd.grad(loss, w)[0]
        return all_reduce(total, "dp", dst=I, op="sum" if mode == "right" else "mean")

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    specs = (P("dp"), P("dp"), P())
    return shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check="global")


def test_a_right_mean_over_microbatches_is_accepted_by_numbers() -> None:
    x, m, w = ARGS
    leaf = w.clone().requires_grad_()
    loss = ((x @ leaf).square().sum(-1) * m).sum() / m.sum()
    [expected] = torch.autograd.grad(loss, leaf)
    torch.testing.assert_close(mapped("right")(*ARGS), expected)


@pytest.mark.parametrize("mode", ["mean of means", "averaged instead of summed"])
def test_a_wrong_mean_over_microbatches_is_told_with_its_numbers(mode: str) -> None:
    with pytest.raises(ShardTypeError) as caught:
        mapped(mode)(*ARGS)
    hold("parts_of_rows.txt", mode, str(caught.value))

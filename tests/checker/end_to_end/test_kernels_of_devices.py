"""Calls for which torch has another kernel without data, or batched, than the device runs."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import P, make_mesh, shard_map
from tests.programs.support.harness import random

MESH = make_mesh((2,), ("tp",), kind="simulated")


def grouped(x: Tensor, w: Tensor, offsets: Tensor) -> Tensor:
    return functional.grouped_mm(x, w, offs=offsets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_grouped_product_of_any_dtype_is_checked(dtype: torch.dtype) -> None:
    """Its kernel without data takes bfloat16 alone."""
    x, w = random((8, 16), 0).to(dtype), random((2, 16, 16), 1).to(dtype)
    offsets = torch.tensor([4, 8], dtype=torch.int32)
    f = shard_map(
        grouped, mesh=MESH, in_specs=(P(), P(None, None, "tp"), P()), out_specs=P(None, "tp")
    )
    torch.testing.assert_close(f(x, w, offsets), grouped(x, w, offsets))


@pytest.mark.parametrize("check", [True, "global"])
def test_attention_with_a_mask_that_is_learned_has_its_gradient(check: Any) -> None:
    """Batched, torch would take a kernel that has none for the mask."""
    values = [random((2, 4, 6, 8), i) for i in range(3)] + [random((1, 4, 6, 6), 3)]

    def attention(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
        return functional.scaled_dot_product_attention(q, k, v, attn_mask=bias)

    f = shard_map(
        attention, mesh=MESH, in_specs=P(None, "tp"), out_specs=P(None, "tp"), check=check
    )
    found, expected = (
        torch.autograd.grad(run(*leaves).square().sum(), leaves)
        for run in (f, attention)
        for leaves in [[x.clone().requires_grad_() for x in values]]
    )
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other)

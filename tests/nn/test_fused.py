"""Attention on simulated ranks in torch's kernel is that on one device, also differentiated."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shardmap_torch import I, P, all_reduce, make_mesh, shard_map, value_and_grad
from shardmap_torch.nn import attention
from tests.nn.support.cases import random

Q, K, V = (random(4, 6, 4, 2, seed=seed) for seed in range(3))
SPEC: Final = P("dp", None, "tp")
MESH: Final = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # of torch's own

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def on_mesh(causal: bool = True) -> Loss:
    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = attention(q, k, v, causal=causal).square().sum()
        return all_reduce(y, ("dp", "tp"), dst=I)

    return shard_map(loss, mesh=MESH, in_specs=(SPEC,) * 3, out_specs=P())


def one_device(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """In torch's own operations, with all scores."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    total: Tensor = (scores.softmax(-1) @ v).square().sum()
    return total


def outside(loss: Loss) -> tuple[Tensor, ...]:
    xs = [x.clone().requires_grad_() for x in (Q, K, V)]
    return torch.autograd.grad(loss(*xs), xs)


def twice_outside(loss: Loss) -> tuple[Tensor, ...]:
    xs = [x.clone().requires_grad_() for x in (Q, K, V)]
    with sdpa_kernel(SDPBackend.MATH):
        found = torch.autograd.grad(loss(*xs), xs, create_graph=True)
    return torch.autograd.grad(torch.stack([x.pow(3).sum() for x in found]).sum(), xs)


def by_torch_func(loss: Loss) -> Any:
    return torch.func.grad(loss, argnums=(0, 1, 2))(Q, K, V)


def twice_by_torch_func(loss: Loss) -> Any:
    first = torch.func.grad(loss)
    return torch.func.grad(lambda *xs: first(*xs).pow(3).sum(), argnums=(0, 1, 2))(Q, K, V)


def forward_mode(loss: Loss) -> Any:
    return torch.func.jvp(loss, (Q, K, V), (K, V, Q))


@pytest.mark.parametrize(
    "derive", [outside, twice_outside, by_torch_func, twice_by_torch_func, forward_mode]
)
def test_derivatives_are_those_of_one_device(derive: Callable[[Loss], Any]) -> None:
    torch.testing.assert_close(derive(on_mesh()), derive(one_device))


@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients_taken_in_the_body_are_those_of_one_device(causal: bool) -> None:
    outs = P(partial=("dp", "tp")), (SPEC,) * 3

    def loss(xs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return attention(*xs, causal=causal).square().sum()

    step = shard_map(value_and_grad(loss), mesh=MESH, in_specs=((SPEC,) * 3,), out_specs=outs)
    value, gradients = step((Q, K, V))
    torch.testing.assert_close(value, one_device(Q, K, V, causal))
    expected = torch.func.grad(one_device, argnums=(0, 1, 2))(Q, K, V, causal)
    torch.testing.assert_close(gradients, expected)


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_hidden_keys_stay_hidden_where_the_scale_is_not_positive(scale: float) -> None:
    """torch's kernels multiply what hides a key by the scale as well."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, scale=scale)

    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attention(Q, K, V, mask=mask, scale=scale)
    assert expected.isfinite().all()
    torch.testing.assert_close(attend(Q, K, V), expected)
    on_ranks = shard_map(attend, mesh=MESH, in_specs=(SPEC,) * 3, out_specs=SPEC)
    torch.testing.assert_close(on_ranks(Q, K, V), expected)

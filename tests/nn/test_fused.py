"""Attention on simulated ranks in torch's kernel is that on one device, also differentiated."""

import importlib
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, all_reduce, make_mesh, shard_map, value_and_grad
from shardmap_torch.nn import attention
from tests.nn.support.cases import random

Q, K, V = (random(4, 6, 4, 2, seed=seed) for seed in range(3))
SPEC: Final = P("dp", None, "tp")
MESHES: Final = pytest.mark.parametrize("shape", [(1, 1), (2, 2)], ids=["one rank", "2x2"])
Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


@pytest.fixture
def kernel_runs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Has the number of sequences of each run of the kernel, those of all ranks together."""
    runs: list[int] = []

    def noted(ctx: object, q: Tensor, *rest: Any) -> Tensor:
        runs.append(q.shape[0])
        y: Tensor = forward(ctx, q, *rest)
        return y

    kernel: Any = importlib.import_module("shardmap_torch.nn.attention")._Fused
    forward = kernel.forward
    monkeypatch.setattr(kernel, "forward", staticmethod(noted))
    return runs


def on_mesh(shape: tuple[int, int], causal: bool = True) -> Loss:
    mesh = make_mesh(shape, ("dp", "tp"), kind="simulated")

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y = attention(q, k, v, causal=causal).square().sum()
        return all_reduce(y, ("dp", "tp"), dst=I)

    return shard_map(loss, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=P())


def one_device(q: Tensor, k: Tensor, v: Tensor, causal: bool = True) -> Tensor:
    """In torch's own operations, with all scores."""
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    scores = q @ k.mT / q.shape[-1] ** 0.5
    if causal:
        scores = scores.masked_fill(~torch.ones(6, 6, dtype=torch.bool).tril(), -torch.inf)
    total: Tensor = (scores.softmax(-1) @ v).square().sum()
    return total


@MESHES
@pytest.mark.parametrize("causal", [True, False])
def test_the_heads_of_all_ranks_run_at_once(
    shape: tuple[int, int], causal: bool, kernel_runs: list[int]
) -> None:
    loss = on_mesh(shape, causal)
    expected = one_device(Q, K, V, causal)
    torch.testing.assert_close(loss(Q, K, V), expected)
    assert kernel_runs == [4 * shape[1]]  # the ranks of "tp" have heads of each sequence


@MESHES
@pytest.mark.parametrize("times", [1, 2])
def test_derivatives_from_outside_are_those_of_one_device(
    shape: tuple[int, int], times: int, kernel_runs: list[int]
) -> None:
    def derivative(loss: Loss) -> tuple[Tensor, ...]:
        xs = [x.clone().requires_grad_() for x in (Q, K, V)]
        found = torch.autograd.grad(loss(*xs), xs, create_graph=times == 2)
        if times == 2:
            found = torch.autograd.grad(torch.stack([x.pow(3).sum() for x in found]).sum(), xs)
        return found

    torch.testing.assert_close(derivative(on_mesh(shape)), derivative(one_device))
    assert kernel_runs


@MESHES
def test_gradients_taken_in_the_body_are_those_of_one_device(
    shape: tuple[int, int], kernel_runs: list[int]
) -> None:
    mesh = make_mesh(shape, ("dp", "tp"), kind="simulated")
    outs = P(partial=("dp", "tp")), (SPEC,) * 3

    def loss(xs: tuple[Tensor, Tensor, Tensor]) -> Tensor:
        return attention(*xs, causal=True).square().sum()

    step = shard_map(value_and_grad(loss), mesh=mesh, in_specs=((SPEC,) * 3,), out_specs=outs)
    value, gradients = step((Q, K, V))
    torch.testing.assert_close(value, one_device(Q, K, V))
    expected = torch.func.grad(one_device, argnums=(0, 1, 2))(Q, K, V)
    torch.testing.assert_close(gradients, expected)
    assert kernel_runs


def test_a_transform_of_torch_func_has_the_scores_in_memory(kernel_runs: list[int]) -> None:
    found = torch.func.grad(on_mesh((2, 2)))(Q, K, V)
    torch.testing.assert_close(found, torch.func.grad(one_device)(Q, K, V))
    assert not kernel_runs


def test_a_value_that_is_equal_on_all_ranks_is_not_repeated(kernel_runs: list[int]) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
    specs = P("dp"), P("dp"), P()
    f = shard_map(attention, mesh=mesh, in_specs=specs, out_specs=P("dp"))
    torch.testing.assert_close(f(Q, K, V[:2]), attention(Q, K, torch.cat([V[:2], V[:2]])))
    assert kernel_runs == [4]


@pytest.mark.parametrize("scale", [-1.0, 0.0])
def test_hidden_keys_stay_hidden_where_the_scale_is_not_positive(scale: float) -> None:
    """torch's kernels multiply what hides a key by the scale as well."""
    mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q, k, v, causal=True, scale=scale)

    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    expected = attention(Q, K, V, mask=mask, scale=scale)
    assert expected.isfinite().all()
    torch.testing.assert_close(attend(Q, K, V), expected)
    on_ranks = shard_map(attend, mesh=mesh, in_specs=(SPEC,) * 3, out_specs=SPEC)
    torch.testing.assert_close(on_ranks(Q, K, V), expected)

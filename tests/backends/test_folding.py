"""Products on many simulated ranks: one matmul each, with the values that every rank alone has."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    checkpoint,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.core.torch_private.engine import TorchDispatchMode
from tests.programs.support.harness import random

RANKS = 32
MESH = make_mesh((RANKS,), ("tp",), kind="simulated")
BY_RANK = make_mesh((RANKS,), ("tp",), kind="simulated", simulate="ranks")

X, W1, W2 = random((RANKS, 6), 0) / 8, random((6, 2 * RANKS), 1) / 8, random((2 * RANKS, 5), 2) / 8


def summed(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.relu(convert(x, "tp", src=I, dst=R) @ w1)
    return all_reduce(h @ w2, "tp", dst=I)


def scattered(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = torch.matmul(convert(x, "tp", src=I, dst=R), w1).sin()
    y: Tensor = all_gather(reduce_scatter(h.mm(w2), "tp", dim=0), "tp", dim=0, dst=I)
    return y


def linear(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = functional.linear(convert(x, "tp", src=I, dst=R), w1.t()).sin()
    return all_reduce(functional.linear(h, w2.t()), "tp", dst=I)


def used_after_its_sum(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = (convert(x, "tp", src=I, dst=R) @ w1) @ w2
    return all_reduce(y, "tp", dst=I) + all_reduce(y * y, "tp", dst=I)


def used_before_its_sum(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = (convert(x, "tp", src=I, dst=R) @ w1) @ w2
    z: Tensor = torch.ops.aten.sin.default(y)
    return all_reduce(y, "tp", dst=I) + all_reduce(z, "tp", dst=I)


def operand_is_written_before_the_sum(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w1
    h = h * 2
    y = h.detach() @ w2.detach()
    h.mul_(3)
    return all_reduce(y, "tp", dst=I) + all_reduce(h @ w2, "tp", dst=I)


def another_is_summed_first(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w1
    other = h.sin() @ w2
    y = h @ w2
    return all_reduce(other, "tp", dst=I) * all_reduce(y, "tp", dst=I)


def without_gradients(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w1
    with torch.no_grad():
        y = h @ w2
    return all_reduce(y, "tp", dst=I) + all_reduce(h @ w2, "tp", dst=I)


def recomputed(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y: Tensor = checkpoint(summed, x, w1, w2)
    return y


def returned_as_well(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    y = (convert(x, "tp", src=I, dst=R) @ w1) @ w2
    z = all_reduce(y, "tp", dst=I)
    inner = torch.func.vmap(lambda row: row.sum())(y)
    found: Tensor = z * all_reduce(inner.sum(), "tp", dst=I)
    return found


def derived(body: Callable[..., Tensor], mesh: Any) -> list[Tensor]:
    specs = P(invariant="tp"), P(None, "tp"), P("tp")
    f = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P())
    xs = [x.clone().requires_grad_() for x in (X, W1, W2)]
    y = f(*xs)
    return [y.detach(), *torch.autograd.grad(y.sin().sum(), xs, allow_unused=True)]


BODIES = (
    summed,
    scattered,
    linear,
    used_after_its_sum,
    used_before_its_sum,
    operand_is_written_before_the_sum,
    another_is_summed_first,
    without_gradients,
    returned_as_well,
    recomputed,
)


@pytest.mark.parametrize("body", BODIES)
def test_folded_products_have_the_values_and_gradients_of_single_ranks(
    body: Callable[..., Tensor],
) -> None:
    for actual, expected in zip(derived(body, MESH), derived(body, BY_RANK), strict=True):
        torch.testing.assert_close(actual, expected, rtol=1e-12, atol=1e-12)


class Sizes(TorchDispatchMode):
    """Notes how many numbers each operation computes."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.computed: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, Tensor) and not func.is_view and func is not NOT_COMPUTED:
            self.computed.append(out.numel())
        return out


NOT_COMPUTED = torch.ops.aten.new_empty.default


@pytest.mark.parametrize("body", [summed, scattered, linear])
def test_no_operation_computes_what_each_rank_would_add(body: Callable[..., Tensor]) -> None:
    derived(body, MESH)  # checks it
    with Sizes() as sizes:
        derived(body, MESH)
    assert RANKS * 5 in sizes.computed
    assert max(sizes.computed) <= 2 * RANKS * RANKS  # the hidden layer, unsharded

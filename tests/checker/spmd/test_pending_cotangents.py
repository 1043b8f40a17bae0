"""A pull-back takes pending sums as cotangents of what all ranks have and use apart, and no others.

On one device the cotangent is their sum; a linear pull-back may come before or after it.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    Function,
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    make_mesh,
    shard_map,
    vjp,
)
from shardmap_torch.nn import fsdp_gather
from tests.checker.support.one_device import assert_is_refused, numbers
from tests.support.golden import told

W, X = torch.arange(1.0, 5.0).double(), torch.arange(8.0).double().reshape(2, 4)


def pending(used: Tensor, x: Tensor) -> Tensor:
    """The gradient of (used * x).sum() for what is equal on all ranks: each has an addend."""
    value, pull = vjp(lambda u: (u * x).square().sum(), used)
    gradient: Tensor = pull(torch.ones_like(value))[0]
    return gradient


def on_mesh(body: Callable[[Tensor, Tensor], Any], weight: P, out: Any, simulate: Any) -> Any:
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate=simulate)
    f = shard_map(body, mesh=mesh, in_specs=(weight, P("dp")), out_specs=out, check="global")
    return f(W, X)


def doubled(w: Tensor, x: Tensor) -> Tensor:
    used, pull = vjp(lambda w: 2 * w, w)
    total: Tensor = all_reduce(pull(pending(used, x))[0], "dp", dst=I)
    return total


def gathered(w: Tensor, x: Tensor) -> Tensor:
    used, pull = vjp(lambda w: 2 * all_gather(w, "dp", dst=R), w)
    gradient: Tensor = pull(pending(used, x))[0]
    return gradient


def in_a_buffer(w: Tensor, x: Tensor) -> Tensor:
    used, pull = vjp(lambda w: 2 * fsdp_gather(w, P("dp"), "dp"), w)
    gradient: Tensor = pull(pending(used, x))[0]
    return gradient


@pytest.mark.parametrize("simulate", ["vmap", "ranks"])
@pytest.mark.parametrize(
    ("body", "spec"), [(doubled, P()), (gathered, P("dp")), (in_a_buffer, P("dp"))]
)
def test_addends_are_pulled_back_as_their_sum(
    body: Callable[[Tensor, Tensor], Tensor], spec: P, simulate: str
) -> None:
    expected = torch.func.grad(lambda w: (2 * w * X).square().sum())(W)
    assert on_mesh(body, spec, spec, simulate).equal(expected)


class Copied(Function):
    """A backward of one's own."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    setup_context = staticmethod(lambda ctx, inputs, output: None)

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent.clone()


class Curved(Copied):
    """One that is not linear."""

    @staticmethod
    def backward(ctx: Any, cotangent: Tensor) -> Tensor:
        return cotangent.cos()


def of_a_sum_that_is_done(w: Tensor, x: Tensor) -> Tensor:
    y, pull = vjp(lambda w: all_reduce((w * x).sum(0), "dp", dst=I), w)
    total: Tensor = all_reduce(pull(pending(y, x))[0], "dp", dst=I)
    return total


def of_a_sum_that_is_pending(w: Tensor, x: Tensor) -> Tensor:
    _, pull = vjp(lambda w: (w * x).sum(0), w)
    total: Tensor = all_reduce(pull(pending(w, x))[0], "dp", dst=I)
    return total


def of_code_that_is_not_linear(w: Tensor, x: Tensor) -> Tensor:
    used, pull = vjp(Curved.apply, w)
    total: Tensor = all_reduce(pull(pending(used, x))[0], "dp", dst=I)
    return total


def unsummed(w: Tensor, x: Tensor) -> Tensor:
    used, pull = vjp(lambda w: 2 * w, w)
    gradient: Tensor = pull(pending(used, x))[0]
    return gradient.square()


@pytest.mark.parametrize(
    "body",
    [
        of_a_sum_that_is_done,
        of_a_sum_that_is_pending,
        of_code_that_is_not_linear,
        unsummed,
    ],
)
def test_other_pull_backs_of_addends_are_refused(body: Callable[[Tensor, Tensor], Tensor]) -> None:
    with told(ShardTypeError):
        on_mesh(body, P(), P(), "auto")


def test_a_cotangent_that_each_rank_counts_by_itself_is_refused() -> None:
    def pulled(x: Tensor) -> Tensor:
        found: Tensor = torch.func.vjp(torch.sin, x)[1](torch.arange(x.shape[0], dtype=x.dtype))[0]
        return found

    assert_is_refused(pulled, [numbers(4)], P("a"), P("a"))

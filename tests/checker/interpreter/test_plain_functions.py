"""Megatron's mappings as they are: plain autograd Functions whose backward communicates."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_reduce,
    check_program,
    convert,
    make_mesh,
    shard_map,
)
from tests.nn.support.cases import Case, assert_equal_on_processes, assert_equals_one_device, random
from tests.support.golden import hold_own
from tests.support.pool import Gloo


class Mapping(torch.autograd.Function):
    @classmethod
    def of(cls, x: Tensor) -> Tensor:
        y: Tensor = cls.apply(x)  # type: ignore[no-untyped-call]  # torch leaves it untyped
        return y


class Copy(Mapping):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad, "tp", dst=I)


class Reduce(Mapping):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return all_reduce(x, "tp", dst=I)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class ReduceTwice(Reduce):
    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return all_reduce(grad, "tp", dst=R)


def blocks(x: Tensor, up: Tensor, down: Tensor, copy: Any = Copy, reduce: Any = Reduce) -> Tensor:
    for _ in range(2):
        x = x + reduce.of(torch.tanh(copy.of(x) @ up) @ down)
    return x


def on_one_device(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    for _ in range(2):
        x = x + torch.tanh(x @ up) @ down
    return x


INPUTS = random(2, 4, 6), random(6, 8), random(8, 6)
SPECS = P("dp"), P(None, "tp"), P("tp")


def over(body: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def replicated(x: Tensor, up: Tensor, down: Tensor) -> Tensor:
        return body(x, *convert((up, down), "dp", src=I, dst=R))

    return replicated


CASE = Case(over(blocks), on_one_device, SPECS, P("dp"), INPUTS)
CASES = {"blocks": CASE}
"""Other mappings are those of examples/megatron_style."""


@pytest.mark.parametrize("simulate", ["ranks", "auto"])
def test_values_and_gradients_are_those_of_one_device(simulate: Any) -> None:
    assert_equals_one_device(CASE, simulate)


def test_on_processes_values_and_gradients_are_those_of_one_device(gloo: Gloo) -> None:
    assert_equal_on_processes(CASES, __name__, gloo)


def refusal(copy: Any, reduce: Any, check: Any) -> str:
    mesh = make_mesh((2,), ("tp",), kind="abstract")
    f = shard_map(
        lambda x, up, down: blocks(x, up, down, copy, reduce),
        mesh=mesh,
        in_specs=(P(), P(None, "tp"), P("tp")),
        out_specs=P(),
        check=check,
    )
    with pytest.raises(ShardTypeError) as caught:
        check_program(f, *(x.clone().requires_grad_() for x in INPUTS))
    return str(caught.value)


@pytest.mark.parametrize("check", [True, "global"])
def test_a_sum_whose_backward_sums_again_is_refused(check: Any) -> None:
    text = refusal(Copy, ReduceTwice, check)
    hold_own(text.splitlines()[0])


def test_a_sum_of_the_forward_is_not_used_in_different_ways() -> None:
    """The backward of a sum gives addends the cotangent as it is, so it has to be the sum's."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return all_reduce((Reduce.of(x @ w) * w.sum()).sum(), "tp", dst=I)

    mesh = make_mesh((2,), ("tp",), kind="abstract")
    f = shard_map(body, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
    with pytest.raises(ShardTypeError, match="I and V"):
        check_program(f, torch.ones(2, 4), torch.ones(4, 3).requires_grad_())


def test_a_function_that_the_body_makes_anew_each_time_communicates_in_its_backward() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        class Made(Copy):
            pass

        return all_reduce((Made.of(x) @ w).sin().sum(), "tp", dst=I)

    x = torch.linspace(-1, 1, 6, dtype=torch.float64).reshape(2, 3).requires_grad_()
    w = torch.linspace(0, 1, 12, dtype=torch.float64).reshape(3, 4).requires_grad_()
    mesh = make_mesh((2,), ("tp",), kind="simulated", simulate="ranks")
    specs: Any = {"in_specs": (P(invariant={"tp"}), P(None, "tp")), "out_specs": P()}
    found = torch.autograd.grad(shard_map(body, mesh=mesh, **specs)(x, w), (x, w))
    for one, other in zip(found, torch.autograd.grad((x @ w).sin().sum(), (x, w)), strict=True):
        torch.testing.assert_close(one, other)

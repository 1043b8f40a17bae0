"""Functions of the user's own in a checked body: right backwards pass, wrong ones are told."""

from typing import Any

import pytest
import torch
from torch import Tensor

import shardmap_torch
from shardmap_torch import I, P, all_reduce
from shardmap_torch.rule import TypedFunction
from tests.checker.test_bugs import U, X, assert_right, numbers, rejection


class Plain(TypedFunction):
    """A product whose backward does not sum over the ranks."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return grad @ w.mT, x.mT @ grad


class SetUp(TypedFunction):
    """The same in torch's newer form."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    backward = Plain.backward


class Summing(shardmap_torch.Function):
    """The same, and the backward sums."""

    @staticmethod
    def forward(x: Tensor, w: Tensor) -> Tensor:
        return x @ w

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return all_reduce(grad @ w.mT, "tp", dst=I), x.mT @ grad


W = numbers(6, 8)
COLUMNS: dict[str, Any] = {
    "in_specs": (P(invariant={"tp"}), P(None, "tp")),
    "out_specs": P(None, "tp"),
}


def test_a_function_whose_backward_sums_is_right() -> None:
    def inner(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = Summing.apply(all_reduce(x, "tp", dst=I), w)
        return y

    def one(x: Tensor, w: Tensor) -> Tensor:
        return x.reshape(4, 2, 6).sum(0) @ w

    assert_right(lambda x, w: Summing.apply(x, w), torch.mm, X, W, **COLUMNS)
    specs: dict[str, Any] = {**COLUMNS, "in_specs": (P("tp"), P(None, "tp"))}
    assert_right(inner, one, X, W, **specs)


@pytest.mark.parametrize("function", [Plain, SetUp])
def test_a_function_whose_operands_are_used_alike_is_right(function: Any) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = function.apply(x, w)
        return all_reduce(y.square().sum(), "tp", dst=I)

    def one(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).square().sum()

    assert_right(body, one, X, W, in_specs=(P("tp"), P()), out_specs=P())


@pytest.mark.parametrize("function", [Plain, SetUp])
def test_a_backward_that_forgets_the_sum_is_told_with_the_forward_s_line(function: Any) -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y = all_reduce(x, "tp", dst=I)
        z: Tensor = function.apply(y, w)
        return z

    line = function.forward.__code__.co_firstlineno
    lines = rejection(
        body, X, W, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    ).splitlines()
    assert lines[0] == (
        f"body: over 'tp', an operand of {function.__name__} is I and its backward gives it a "
        "gradient that is V: each rank has its own part of it, and nothing sums them."
    )
    assert lines[1].startswith("  at test_functions.py:")
    assert int(lines[1].split(":")[1]) in range(line, line + 4)
    made = body.__code__.co_firstlineno + 1
    assert lines[2] == (
        "  the operand is float64[2, 6], from all_reduce('tp', P -> I) at "
        f'test_functions.py:{made}: y = all_reduce(x, "tp", dst=I)'
    )
    assert lines[4:] == [
        "Fix: give it the operand as R, with convert(x, 'tp', src=I, dst=R), or sum the gradient "
        "in the backward of a shardmap_torch.Function.",
        f"Tried, and well-typed: dst=R in all_reduce at test_functions.py:{made}",
    ]


def test_under_torch_func_the_forward_is_judged() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        grad: Tensor = torch.func.grad(lambda x: SetUp.apply(x, w).sum())(x)
        return grad

    text = rejection(body, X.detach(), W.detach(), in_specs=COLUMNS["in_specs"], out_specs=P())
    assert "mm over axis 'tp' of I and V" in text
    line = SetUp.forward.__code__.co_firstlineno + 2
    assert f"  at test_functions.py:{line}: return x @ w" in text


def test_a_backward_in_the_body_is_watched_too() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        leaf = x.detach().requires_grad_()
        y = all_reduce(leaf, "tp", dst=I)
        (grad,) = torch.autograd.grad(Plain.apply(y, w).sum(), leaf)
        return grad

    text = rejection(
        body, U.detach(), W.detach(), in_specs=(P("tp"), P(None, "tp")), out_specs=P("tp")
    )
    assert "an operand of Plain is I and its backward gives it a gradient that is V" in text

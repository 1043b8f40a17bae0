"""Functions of the user's own in a checked body: right backwards pass, wrong ones are told."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import shardmap_torch
from shardmap_torch import I, P, ShardTypeError, all_reduce, make_mesh, shard_map
from tests.checker.support.rejections import Plain, U, X, assert_right, numbers, rejection


class Summing(shardmap_torch.Function):
    """A Function whose backward sums."""

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


# ------------------------------------------------------------------------ under torch.func


def gradients(function: Any) -> Callable[..., Any]:
    """Gradients that are taken in the body, of a loss that all ranks share."""

    def body(x: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        def loss(x: Tensor, w: Tensor) -> Tensor:
            y = torch.tanh(function.apply(torch.sin(x), w))
            return all_reduce(y.square().sum(), "tp", dst=I)

        grads: tuple[Tensor, Tensor] = torch.func.grad(loss, (0, 1))(x, w)
        return grads

    return body


GRADIENTS: dict[str, Any] = {**COLUMNS, "out_specs": (P(), P(None, "tp"))}


RANKS = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")


class Batched(Summing):
    """A Function that torch.func.vmap can batch."""

    generate_vmap_rule = True


def test_so_it_is_for_each_item_of_a_batch() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        def loss(x: Tensor) -> Tensor:
            y: Tensor = Batched.apply(x.unsqueeze(0), w)
            return all_reduce(y.square().sum(), "tp", dst=I)

        out: Tensor = torch.func.vmap(torch.func.grad(loss))(x)
        return out

    specs: dict[str, Any] = {**COLUMNS, "out_specs": P()}
    found = shard_map(body, mesh=RANKS, **specs)(X.detach(), W.detach())
    torch.testing.assert_close(found, 2 * X.detach() @ W.detach() @ W.detach().mT)


def differentiated_from_outside(body: Any) -> str:
    """The body itself is right, as a step whose results are not differentiated again."""
    mapped: Any = shard_map(body, mesh=RANKS, **GRADIENTS)
    gradient = mapped(X, W)[0]
    with pytest.raises(ShardTypeError) as caught:
        torch.autograd.grad(gradient.sum(), X)
    return str(caught.value)


def test_a_backward_that_is_right_only_once_is_rejected_where_it_is_differentiated() -> None:
    """The gradient that `Summing` gives `w` mixes I and V, and its own gradient is never summed."""
    body = gradients(Summing)

    def twice(x: Tensor, w: Tensor) -> Tensor:
        grad: Tensor = torch.func.grad(lambda x: body(x, w)[1].square().sum())(x)
        return grad

    def by_hand(x: Tensor, w: Tensor) -> Tensor:
        def inner(x: Tensor, w: Tensor) -> Tensor:
            y: Tensor = Summing.apply(x, w)
            (grad,) = torch.autograd.grad(y.square().sum(), w, create_graph=True)
            return grad.square().sum()

        grads: tuple[Tensor, Tensor] = torch.func.grad(inner, (0, 1))(x, w)
        return grads[0]

    specs: dict[str, Any] = {"in_specs": COLUMNS["in_specs"], "out_specs": P()}
    texts = [
        rejection(twice, X.detach(), W.detach(), **specs),
        rejection(by_hand, X.detach(), W.detach(), **specs),
        differentiated_from_outside(body),
    ]
    for text in texts:
        assert "mm over axis 'tp' of I and V: the I operand's gradient would differ" in text
        assert "\n  in the backward at test_custom_functions.py:" in text


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

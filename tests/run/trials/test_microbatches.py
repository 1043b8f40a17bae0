"""check="global": loops over microbatches of a batch that ranks share, which are tried."""

from collections.abc import Callable, Mapping
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    check_program,
    convert,
    make_mesh,
    shard_map,
    vjp,
)

Step = Callable[[Tensor, Tensor, Tensor], Tensor]
COUNT: Final = 3
X: Final = torch.randn(12, 4, dtype=torch.float64)
Y: Final = torch.randn(12, 5, dtype=torch.float64)
W: Final = torch.randn(4, 5, dtype=torch.float64)


def grad(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().mean()


def concatenated(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.cat([(mb @ w).softmax(-1) for mb in x.chunk(COUNT)])
    return all_reduce(rows.T @ y, "dp", dst=I)


def detached_in_one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf, acc = w.detach().requires_grad_(), torch.zeros_like(w)
    for i, mb in enumerate(x.chunk(COUNT)):
        h = mb @ leaf
        acc = acc + torch.autograd.grad((h.square() * (h if i else h.detach())).sum(), leaf)[0]
    return all_reduce(acc, "dp", dst=I)


def with_a_hook(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()

    def squared(g: Tensor) -> Tensor:
        return convert(all_reduce(g, "dp", dst=R).square(), "dp", src=R, dst=Partial)

    leaf.register_hook(squared)
    for mb in x.chunk(COUNT):
        (mb @ leaf).sum().backward()
    assert leaf.grad is not None
    return all_reduce(leaf.grad, "dp", dst=I)


def added_without_gradient(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def of(w: Tensor) -> Tensor:
        acc = torch.zeros((), dtype=w.dtype)
        for i, mb in enumerate(x.chunk(COUNT)):
            h = (mb @ w).square().sum()
            with torch.set_grad_enabled(i > 0):
                acc = acc + h
        return all_reduce(acc, "dp", dst=I)

    return all_reduce(grad(of, w), "dp", dst=I)


WRONG: Final[list[Step]] = [detached_in_one, with_a_hook, added_without_gradient]
"""Loops that depend on how rows are divided; random ones are tried in `end_to_end`."""


def on(step: Step, ranks: int, check: str | bool) -> Tensor:
    mesh = make_mesh((ranks,), ("dp",), kind="simulated", simulate="ranks")
    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
    found: Tensor = shard_map(step, mesh=mesh, check=check, **specs)(W, X, Y)  # type: ignore[call-overload]
    return found


def test_rows_that_are_computed_in_a_loop_are_those_of_one_device() -> None:
    torch.testing.assert_close(on(concatenated, 2, "global"), on(concatenated, 1, True))


@pytest.mark.parametrize("step", WRONG)
def test_a_loop_that_depends_on_how_rows_are_divided_is_refused(step: Step) -> None:
    with pytest.raises(ShardTypeError):
        on(step, 2, "global")


def squares(w: Tensor, mb: Tensor) -> Tensor:
    return (mb @ w).square().sum()


def slope(w: Tensor, v: Tensor, mb: Tensor) -> Tensor:
    return grad(lambda w: ((mb @ w).square() * (mb @ v)).sum(), w)


CUT: Final[Mapping[str, Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
    "the value": lambda w, one, other: squares(w, one) + squares(w, other).detach(),
    "inside": lambda w, one, other: squares(w, one) + (other @ w).detach().square().sum(),
    "the weight": lambda w, one, other: squares(w, one) + squares(w.detach(), other),
    "beside a gradient": lambda w, one, other: slope(w, w, one) + slope(w, w.detach(), other),
    "in all": lambda w, one, other: squares(w.detach(), one) + squares(w.detach(), other),
}


@pytest.mark.sample(3)
@pytest.mark.parametrize("where", CUT)
def test_a_gradient_that_ends_in_one_microbatch_only_is_refused(where: str) -> None:
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    shape, dtype = W.shape, W.dtype

    def body(w: Tensor, x: Tensor) -> Tensor:
        return all_reduce(CUT[where](w, *x.chunk(2)), "dp", dst=I)

    def check() -> None:
        specs = {"in_specs": (P(), P("dp")), "out_specs": P()}
        f = shard_map(body, mesh=mesh, check="global", **specs)  # type: ignore[call-overload]
        check_program(f, torch.zeros(shape, dtype=dtype, requires_grad=True), X)

    if where == "in all":
        check()
    else:
        with pytest.raises(ShardTypeError):
            check()


@pytest.mark.parametrize("is_right", [True, False])
def test_microbatches_share_parameters_that_a_vjp_has_gathered_once(is_right: bool) -> None:
    def gradient(w: Tensor, x: Tensor) -> Tensor:
        return grad(lambda w: all_reduce(loss(w, x), "dp", op="mean", dst=I), w)

    def step(w: Tensor, x: Tensor) -> Tensor:
        gathered, pull = vjp(lambda w: all_gather(w, "dp", dst=R), w)
        one, two = x.chunk(2)
        first, second = gradient(gathered, one), gradient(gathered, two)
        (shard,) = pull((first + (second if is_right else 2 * second)) / 2)
        new: Tensor = w - shard / (shard.square() + 1)
        return new

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    specs = (P("dp"), P("dp"))
    f = shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("dp"), check="global")
    w, x = torch.linspace(-1, 1, 4), torch.linspace(-2, 1, 32).reshape(8, 4)
    if not is_right:
        with pytest.raises(ShardTypeError):
            f(w, x)
        return
    expected = grad(lambda w: loss(w, x), w)
    torch.testing.assert_close(f(w, x), w - expected / (expected.square() + 1))

"""Gradients that a body takes: a pending sum for what is equal on all ranks."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    Partial,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    assert_type,
    check_program,
    grad,
    lax,
    make_mesh,
    reduce_scatter,
    reinterpret,
    shard_map,
    vjp,
)
from tests.programs.support.harness import global_value, worker_mesh
from tests.support.pool import Gloo

N: Final = 2
ABSTRACT: Final = make_mesh((N,), ("dp",), kind="abstract")
BATCHED: Final = make_mesh((N,), ("dp",), kind="simulated")
RANKS: Final = make_mesh((N,), ("dp",), kind="simulated", simulate="ranks")
DATA: Final = torch.randn(2 * N, 6, generator=torch.Generator().manual_seed(0)).double()
W: Final = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)).double()

Take = Callable[[Callable[[Tensor], Tensor], Tensor], Tensor]


def by_autograd(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()
    return torch.autograd.grad(f(leaf), leaf)[0]


def by_backward(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()
    f(leaf).backward()
    assert leaf.grad is not None
    return leaf.grad


def by_func(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


def by_vjp(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    loss, pull_back = vjp(f, w)
    found: Tensor = pull_back(torch.ones_like(loss))[0]
    return found


def by_ours(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = grad(f)(w)
    return found


TAKES: Final[dict[str, Take]] = {
    "autograd.grad": by_autograd,
    "backward": by_backward,
    "func.grad": by_func,
    "vjp": by_vjp,
    "shardmap_torch.grad": by_ours,
}


def loss_of(x: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda w: (x @ w).square().sum()


def mapped(body: Callable[..., Any], mesh: Mesh, check: Any = True, **kwargs: Any) -> Any:
    return shard_map(body, mesh=mesh, in_specs=(P(), P("dp")), check=check, **kwargs)


# --------------------------------------------------------------------------------- types


@pytest.mark.parametrize("take", TAKES.values(), ids=TAKES)
def test_the_gradient_of_an_equal_value_is_a_pending_sum(take: Take) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        g = take(loss_of(x), w)
        assert_type(g, {"dp": Partial})
        assert_type(take(lambda x: (x @ w).square().sum(), x), {"dp": V})
        return all_reduce(g, "dp", dst=I)

    check_program(mapped(body, ABSTRACT, out_specs=P()), W, DATA)


def test_the_gradient_of_a_replicate_or_a_zero_value_is_a_pending_sum() -> None:
    def body(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        table = all_gather(x, "dp", dst=R)[:, :4].T @ all_gather(x, "dp", dst=R)
        replicate = by_func(lambda table: (x @ table.T).square().sum(), table)
        zero = by_func(loss_of(x), torch.zeros_like(w))
        assert_type(replicate, {"dp": Partial})
        assert_type(zero, {"dp": Partial})
        return all_reduce((replicate, zero), "dp", dst=I)

    check_program(mapped(body, ABSTRACT, out_specs=P()), W, DATA)


def test_a_gradient_that_a_backward_has_added_to_is_a_pending_sum() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        leaf = w.detach().clone().requires_grad_()
        leaf.grad = held = torch.zeros_like(w)
        loss_of(x)(leaf).backward()
        assert leaf.grad is held
        assert_type(held, {"dp": Partial})
        return all_reduce(held, "dp", dst=I)

    check_program(mapped(body, ABSTRACT, out_specs=P()), W, DATA)


def test_a_pending_sum_is_not_dropped_out_on_each_rank() -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        dropped = torch.native_dropout(by_func(loss_of(x), w), 0.5, True)[0]
        return all_reduce(dropped, "dp", dst=I)

    with pytest.raises(ShardTypeError, match="the bits of a pending sum mean nothing"):
        check_program(mapped(body, ABSTRACT, out_specs=P()), W, DATA)


def test_a_cotangent_that_is_the_gradient_keeps_its_own_type() -> None:
    """`x + b` hands one tensor to both, and to the user who holds it as the cotangent."""

    def body(w: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        cotangent = x.sin()
        _, pull_back = torch.func.vjp(lambda b, x: x + b, torch.zeros_like(x), x)[:2]
        of_b, of_x = pull_back(cotangent)
        assert_type(of_b, {"dp": Partial})
        assert_type(of_x, {"dp": V})
        assert_type(cotangent, {"dp": V})
        return all_reduce(of_b, "dp", dst=I), of_x * of_x, cotangent * cotangent

    specs = P(), P("dp"), P("dp")
    total, of_x, cotangent = mapped(body, BATCHED, out_specs=specs)(W, DATA)
    assert torch.allclose(total, DATA.sin().reshape(N, -1, 6).sum(0))
    assert torch.equal(of_x, cotangent)


# ----------------------------------------------------------------------------- right programs


def accumulated(take: Take, w: Tensor, x: Tensor) -> Tensor:
    """Over the two examples of a rank, and summed once."""
    leaf = w.detach().clone().requires_grad_()
    for example in x.split(1):
        loss_of(example)(leaf).backward()
    assert leaf.grad is not None
    return w - 0.1 * all_reduce(leaf.grad, "dp", dst=I)


def kept_buffer(take: Take, w: Tensor, x: Tensor) -> Tensor:
    """`.grad` is set to zero in place, and read through what was held before."""
    leaf = w.detach().clone().requires_grad_()
    leaf.grad = held = torch.zeros_like(w)
    for _ in range(2):
        held.zero_()
        loss_of(x)(leaf).backward()
    return w - 0.1 * all_reduce(held, "dp", dst=I)


def scattered(take: Take, w: Tensor, x: Tensor) -> Tensor:
    part = reduce_scatter(take(loss_of(x), w), "dp")
    return w - 0.1 * all_gather(part, "dp", dst=I)


def by_lax(take: Take, w: Tensor, x: Tensor) -> Tensor:
    return w - 0.1 * N * lax.pmean(take(loss_of(x), w), "dp")


RIGHT: Final = (
    accumulated,
    kept_buffer,
    scattered,
    by_lax,
)
EXPECTED: Final = W - 0.1 * by_autograd(loss_of(DATA), W)


@pytest.mark.parametrize("step", RIGHT)
def test_steps_that_sum_the_gradient_are_accepted_and_right(step: Callable[..., Tensor]) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return step(by_autograd, w, x)

    torch.testing.assert_close(mapped(body, RANKS, out_specs=P())(W, DATA), EXPECTED)


def steps_on_a_process() -> list[float]:
    mesh = worker_mesh((N,), ("dp",))
    errors = []
    for step in RIGHT:
        stepped = mapped(lambda w, x, s=step: s(by_ours, w, x), mesh, out_specs=P())(W, DATA)
        errors.append(float((global_value(stepped) - EXPECTED).abs().max()))
    return errors


def test_they_are_right_on_processes(gloo: Gloo) -> None:
    for errors in gloo(N).run(steps_on_a_process):
        assert max(errors) < 1e-9


def test_a_second_derivative_through_a_summed_gradient_is_right() -> None:
    def second(w: Tensor, x: Tensor, total: Callable[[Tensor], Tensor]) -> Tensor:
        def squared(w: Tensor) -> Tensor:
            return total(by_func(lambda w: (x @ w).tanh().sum(), w)).square().sum()

        return total(by_func(squared, w))

    def body(w: Tensor, x: Tensor) -> Tensor:
        return second(w, x, lambda g: all_reduce(g, "dp", dst=I))

    expected = second(W, DATA, lambda g: g)
    for mesh in (BATCHED, RANKS):
        for check in (True, "global"):
            made = mapped(body, mesh, check, out_specs=P())(W, DATA)
            torch.testing.assert_close(made, expected)


def test_each_rank_s_own_gradient_is_what_reinterpret_says() -> None:
    def local_step(w: Tensor, x: Tensor) -> Tensor:
        for _ in range(2):  # local SGD: weights differ until they are averaged
            g = by_func(loss_of(x), w)
            own = reinterpret(g, "dp", src=Partial, dst=V) if w is first else g
            w = w - 0.01 * own
        return all_reduce(w, "dp", dst=I, op="mean")

    first: Any = None

    def body(w: Tensor, x: Tensor) -> Tensor:
        nonlocal first
        first = w
        return local_step(w, x)

    def one_rank(x: Tensor) -> Tensor:
        w = W
        for _ in range(2):
            w = w - 0.01 * by_func(loss_of(x), w)
        return w

    expected = torch.stack([one_rank(x) for x in DATA.chunk(N)]).mean(0)
    for mesh in (BATCHED, RANKS):
        torch.testing.assert_close(mapped(body, mesh, out_specs=P())(W, DATA), expected)
    with pytest.raises(ShardTypeError, match="keeps the bits and changes the meaning"):
        check_program(mapped(body, ABSTRACT, "global", out_specs=P()), W, DATA)


# ----------------------------------------------------------------------------- wrong programs


def plain_step(w: Tensor, g: Tensor) -> Tensor:
    return w - 0.1 * g


def second_moment(w: Tensor, g: Tensor) -> Tensor:
    moment = 0.1 * g * g
    return w - all_reduce(g, "dp", dst=I) / (all_reduce(moment, "dp", dst=I).sqrt() + 1e-8)


def clipped_by_value(w: Tensor, g: Tensor) -> Tensor:
    return w - 0.1 * all_reduce(g.clamp(-1, 1), "dp", dst=I)


def largest(w: Tensor, g: Tensor) -> Tensor:
    return w - 0.1 * all_reduce(g, "dp", dst=I, op="max")


WRONG: Final[dict[Callable[[Tensor, Tensor], Tensor], str]] = {
    plain_step: "sub over axis 'dp' of Partial and K",
    second_moment: "mul over axis 'dp' of Partial and Partial",
    clipped_by_value: "clamp over axis 'dp' of Partial",
    largest: "all_reduce('dp', V -> I, op='max') takes V",
}


@pytest.mark.parametrize("update", WRONG)
@pytest.mark.parametrize("check", [True, "global"])
def test_a_step_that_uses_an_unreduced_gradient_is_refused_at_its_line(
    update: Callable[[Tensor, Tensor], Tensor], check: Any
) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        return update(w, by_autograd(loss_of(x), w))

    with pytest.raises(ShardTypeError) as caught:
        check_program(mapped(body, ABSTRACT, check, out_specs=P()), W, DATA)
    assert WRONG[update] in str(caught.value)
    line = update.__code__.co_firstlineno
    assert f"test_gradients.py:{line + 1}" in str(caught.value)
    assert "sum the gradient first, with all_reduce(g, 'dp', dst=I)" in str(caught.value)


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad", "RMSprop"])
def test_an_optimizer_of_torch_on_unreduced_gradients_is_refused_at_its_step(name: str) -> None:
    def body(w: Tensor, x: Tensor) -> Tensor:
        leaf = w.detach().clone().requires_grad_()
        optimizer = getattr(torch.optim, name)([leaf], lr=0.1)
        loss_of(x)(leaf).backward()
        optimizer.step()
        return all_reduce(leaf.detach(), "dp", dst=I, op="mean")

    with pytest.raises(ShardTypeError) as caught:
        check_program(mapped(body, ABSTRACT, out_specs=P()), W, DATA)
    assert "optimizer.step()" in str(caught.value).splitlines()[1]

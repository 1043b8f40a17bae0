"""Gradients that a body takes in a vmap, under check="global", against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad, jacrev, vjp, vmap

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    ShardTypeError,
    TransformError,
    V,
    all_gather,
    all_reduce,
    check_program,
    reinterpret,
    shard_map,
)
from tests.checker.support.one_device import RANKS, assert_is_one_device, assert_is_refused, numbers
from tests.support.golden import told

Body = Callable[..., Tensor]

W: Final = numbers(6, 4)
X: Final = numbers(4, 6)
SCALES: Final = numbers(3)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().sum()


def each(w: Tensor, x: Tensor) -> Tensor:
    """Computes the gradient of each sample."""
    found: Tensor = vmap(grad(loss), (None, 0))(w, x)
    return found


def clipped(w: Tensor, x: Tensor) -> Tensor:
    """Clips the gradient of each sample, as private training does, before it sums them."""
    found = each(w, x)
    norms = found.flatten(1).norm(dim=1)[:, None, None]
    total: Tensor = all_reduce((found / (1 + norms)).sum(0), "a", dst=I)
    return total


def meant(w: Tensor, x: Tensor) -> Tensor:
    """Squares the gradient of each sample, which local strictness takes for an addend."""
    found = reinterpret(each(w, x), "a", src=Partial, dst=V)
    total: Tensor = all_reduce(found.square().sum(0), "a", dst=I)
    return total


def of_scales(w: Tensor, x: Tensor, scales: Tensor) -> Tensor:
    """Computes one gradient for each scale, of which each rank has an addend."""
    found: Tensor = vmap(lambda s: grad(loss)(w, s * x))(scales)
    return found


def jacobian(w: Tensor) -> Tensor:
    found: Tensor = jacrev(lambda w: w.square().sum(0))(w)
    return found


EYE: Final = torch.eye(4, dtype=torch.float64)


def rows(
    w: Tensor,
    x: Tensor,
    seeds: Tensor = EYE,
    output: Callable[[Tensor], Tensor] = lambda y: y.tanh().sum(0),
) -> Tensor:
    """Computes a gradient for each cotangent, by what torch.autograd.grad batches itself."""
    p = w.detach().clone().requires_grad_()
    (found,) = torch.autograd.grad(output(x @ p), p, seeds, is_grads_batched=True)
    return found


def of_two(w: Tensor, x: Tensor) -> Tensor:
    p, unused = (w.detach().clone().requires_grad_() for _ in range(2))
    outputs = (x @ p).sum(0), (x @ p).sin().sum(0)
    first, none = torch.autograd.grad(
        outputs, (p, unused), (EYE, EYE), is_grads_batched=True, allow_unused=True
    )
    assert none is None
    total: Tensor = all_reduce(first, "a", dst=I)
    return total


def vectorized(w: Tensor, x: Tensor) -> Tensor:
    derive: Any = torch.autograd.functional.hessian  # untyped in torch
    found = derive(lambda p: (x @ p).tanh().sum(), w.detach(), vectorize=True)
    total: Tensor = all_reduce(found, "a", dst=I)
    return total


def pulled(w: Tensor, seeds: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    pull: Any = vjp(loss, w)[1]
    found: Tensor = vmap(pull)(seeds)[0]
    return found


SEEDS: Final = numbers(8, 4)

RIGHT: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "of samples": (each, (W, X), (P(), P("a")), P("a")),
    "clipped": (clipped, (W, X), (P(), P("a")), P()),
    "of columns": (each, (W, X), (P(None, "a"), P("b")), P("b", None, "a")),
    "of each sample itself": (
        lambda w, x: vmap(grad(loss, 1), (None, 0))(w, x),
        (W, X),
        (P(), P("a")),
        P("a"),
    ),
    "of scales": (
        lambda w, x, s: all_reduce(of_scales(w, x, s), "a", dst=I),
        (W, X, SCALES),
        (P(), P("a"), P()),
        P(),
    ),
    "jacobian": (jacobian, (W,), (P(),), P()),
    "each rank's own, in so many words": (meant, (W, X), (P(), P("a")), P()),
    "batched by torch.autograd.grad": (
        lambda w, x: all_reduce(rows(w, x), "a", dst=I),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "of columns, so batched": (
        lambda w, x: rows(w, x, torch.ones(3, w.shape[1], dtype=w.dtype)),
        (W, X),
        (P(None, "a"), P()),
        P(None, None, "a"),
    ),
    "the mean of means, so batched": (
        lambda w, x: all_reduce(
            rows(w, x, output=lambda y: y.tanh().mean(0)), "a", dst=I, op="mean"
        ),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "of two values, so batched": (of_two, (W, X), (P(), P("a")), P()),
    "vectorized": (vectorized, (W, X), (P(), P("a")), P()),
    "of gathered cotangents": (
        lambda w, x, s: all_reduce(
            pulled(w, all_gather(s, "a", dst=R), lambda p: (x @ p).tanh().sum(0)), "a", dst=I
        ),
        (W, X, SEEDS),
        (P(), P("a"), P("a")),
        P(),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_gradients_in_a_vmap_are_those_of_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


WRONG: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "a mean of a shard's samples": (
        lambda w, x: all_reduce(each(w, x).mean(0), "a", dst=I),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "the sum left out": (lambda w, x: each(w, x).sum(0), (W, X), (P(), P("a")), P()),
    "the square of addends": (
        lambda w, x, s: all_reduce(of_scales(w, x, s).square(), "a", dst=I),
        (W, X, SCALES),
        (P(), P("a"), P()),
        P(),
    ),
    "addends that are meant to be each rank's own": (
        lambda w, x, s: all_reduce(
            reinterpret(of_scales(w, x, s), "a", src=Partial, dst=V).square(), "a", dst=I
        ),
        (W, X, SCALES),
        (P(), P("a"), P()),
        P(),
    ),
    "the norm of all samples of a shard": (
        lambda w, x: each(w, x) / each(w, x).norm(),
        (W, X),
        (P(), P("a")),
        P("a"),
    ),
    "the sum left out of a batch by torch.autograd.grad": (rows, (W, X), (P(), P("a")), P()),
    "the square of addends, so batched": (
        lambda w, x: all_reduce(rows(w, x).square(), "a", dst=I),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "a local size in the cotangents": (
        lambda w, x: all_reduce(rows(w, x, x.shape[0] * EYE), "a", dst=I),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "the sum of means, so batched": (
        lambda w, x: all_reduce(rows(w, x, output=lambda y: y.mean(0)), "a", dst=I),
        (W, X),
        (P(), P("a")),
        P(),
    ),
    "as many cotangents as a rank has rows": (
        lambda w, x: rows(w, x, torch.ones(x.shape[0], 4, dtype=w.dtype)),
        (W, X),
        (P(), P("a")),
        P("a"),
    ),
    "cotangents of each rank's own for a pending sum": (
        lambda w, x, s: pulled(w, s, lambda p: (x @ p).tanh().sum(0)),
        (W, X, SEEDS),
        (P(), P("a"), P("a")),
        P("a"),
    ),
    "cotangents of each rank's own for a sum": (
        lambda w, x, s: pulled(w, s, lambda p: all_reduce((x @ p).sum(0), "a", dst=R)),
        (W, X, SEEDS),
        (P(), P("a"), P("a")),
        P("a"),
    ),
    "cotangents of each rank's own, batched by torch.autograd.grad": (
        rows,
        (W, X, SEEDS),
        (P(), P("a"), P("a")),
        P("a"),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_gradients_in_a_vmap_that_are_others_on_one_device_are_refused(name: str) -> None:
    assert_is_refused(*WRONG[name])


def test_local_strictness_takes_them_for_addends() -> None:
    mapped = shard_map(clipped, mesh=RANKS, in_specs=(P(), P("a")), out_specs=P())
    with pytest.raises(ShardTypeError, match="norm over axis 'a' of Partial"):
        check_program(mapped, W, X)


def test_gradients_of_samples_that_local_strictness_accepts_are_those_of_one_device() -> None:
    mapped = shard_map(meant, mesh=RANKS, in_specs=(P(), P("a")), out_specs=P())
    torch.testing.assert_close(mapped(W, X), each(W, X).square().sum(0))


@pytest.mark.usefixtures("repairs")
def test_no_sum_over_the_ranks_is_advised_for_gradients_of_samples() -> None:
    def adapted(w: Tensor, x: Tensor) -> Tensor:
        losses: Tensor = vmap(lambda x: loss(w - grad(loss)(w, x), x))(x)
        total: Tensor = all_reduce(losses.sum(), "a", dst=I)
        return total

    mapped = shard_map(adapted, mesh=RANKS, in_specs=(P(), P("a")), out_specs=P())
    with told(ShardTypeError):
        check_program(mapped, W, X)


def test_batches_through_a_collective_are_refused_with_what_can_batch_them() -> None:
    mapped = shard_map(
        lambda w, x: rows(w, x, output=lambda y: all_reduce(y.sum(0), "a", dst=I)),
        mesh=RANKS,
        in_specs=(P(), P("a")),
        out_specs=P(),
    )
    with pytest.raises(TransformError, match=r"is_grads_batched=True.* Use torch\.func\.jacrev"):
        check_program(mapped, W, X)

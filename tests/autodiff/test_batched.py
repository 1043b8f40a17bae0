"""Gradients in batched bodies: each rank's own, as it computes them by itself."""

from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    broadcast,
    checkpoint,
    convert,
    grad,
    make_mesh,
    ppermute,
    reduce_scatter,
    shard_map,
    value_and_grad,
)
from shardmap_torch.autodiff.batched import Ranks
from tests.autodiff.support.random_bodies import per_rank
from tests.programs.support.harness import random

SIZES, AXES = (2, 3), ("dp", "tp")
BATCHED = make_mesh(SIZES, AXES, kind="simulated", simulate="vmap")
BY_RANK = make_mesh(SIZES, AXES, kind="simulated", simulate="ranks")

X, W, S = random((4, 6), 0), random((6, 6), 1), random((6, 2), 2)
SPECS = (P("dp", invariant="tp"), P(None, "tp", replicate="dp"), P(invariant=AXES))
"""Of a batch, columns of a weight that each rank of "dp" uses for its own rows, and a scale."""


def sharded(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ (w * convert(s[:, :1], AXES, src=I, dst=R))
    y = all_reduce(h.sin().square().sum(), "tp", dst=I)
    return all_reduce(y, "dp", dst=I) * s.sum()


def exchanged(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    h = all_gather(convert(x, "tp", src=I, dst=R) @ w, "tp", dim=1, dst=R)
    h = reduce_scatter(h @ convert(s, AXES, src=I, dst=R) * (1 + axis_index("tp")), "dp", dim=0)
    moved = ppermute(h, "tp", [(0, 1), (1, 2), (2, 0)]) * h
    moved = all_to_all(moved, "dp", split_dim=1, concat_dim=0)
    return all_reduce(moved.sum() * broadcast(h.cos().sum(), "tp", 1, dst=R), AXES, dst=I)


def largest(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w
    peak = all_reduce(h.amax(), "tp", op="max", dst=R)
    total = all_reduce((h - peak).exp().sum(), "tp", dst=I).log()
    return all_reduce(total, "dp", op="mean", dst=I) + s[0].sum()


def of_one_rank_of_dp(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Each has its own loss."""
    return all_reduce((convert(x, "tp", src=I, dst=R) @ w).sin().sum(), "tp", dst=I)


def of_each_rank(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return (convert(x, "tp", src=I, dst=R).sin() @ w).square().sum()


def of_what_is_equal(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return s.square().sum()


def gathered_weight(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return all_reduce((x @ all_gather(w, "tp", dim=1, dst=I)).sin().sum(), "dp", dst=I)


def kept_by_one_rank(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """Its typed gradient is the first rank's alone."""
    h = all_gather(convert(x, "tp", src=I, dst=R) @ w, "tp", dim=1, dst=R)
    return all_reduce(convert(h, "tp", src=R, dst=I).sin().sum(), "dp", dst=I)


def recomputed(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    y: Tensor = checkpoint(sharded, x, w, s)
    return y


def rounded(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    h = convert(x, "tp", src=I, dst=R) @ w
    y: Tensor = all_reduce(h.sum(), AXES, dst=I, grad_comm_dtype=torch.float32)
    return y


def nested(x: Tensor, w: Tensor, s: Tensor) -> Tensor:
    """A second derivative, whose first one is taken in the function that is differentiated."""
    inner = all_reduce(grad(sharded, argnums=1)(x, w, s), "dp", dst=I)
    y: Tensor = all_reduce(inner.square().sum(), "tp", dst=I)
    return y


BY_AUTOGRAD = (
    (sharded, "xws"),
    (exchanged, "xws"),
    (largest, "xws"),
    (of_one_rank_of_dp, "xw"),
    (of_each_rank, "w"),
    (of_what_is_equal, "xws"),
    (gathered_weight, "w"),
    (recomputed, "xws"),
)
"""Losses and what they can be differentiated by."""

BY_TRANSFORM = ((kept_by_one_rank, "w"), (rounded, "w"), (nested, "w"))

Loss = Callable[[Tensor, Tensor, Tensor], Tensor]


def differentiated(loss: Loss, names: str, mesh: Mesh) -> Callable[..., tuple[Tensor, ...]]:
    """Returns a function that stacks the values and gradients of all ranks."""
    argnums = tuple("xws".index(name) for name in names)

    def body(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        value, found = value_and_grad(loss, argnums)(x, w, s)
        return tuple(map(per_rank, (value, *found)))

    return shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=P(AXES))


@pytest.mark.parametrize(("loss", "names"), [*BY_AUTOGRAD, *BY_TRANSFORM])
def test_each_rank_of_a_batched_body_has_the_gradients_that_it_has_alone(
    loss: Loss, names: str
) -> None:
    found = differentiated(loss, names, BATCHED)(X, W, S)
    expected = differentiated(loss, names, BY_RANK)(X, W, S)
    for actual, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("loss", "names"), [*BY_AUTOGRAD, *BY_TRANSFORM])
def test_torch_func_differentiates_only_what_autograd_would_not_alike(
    loss: Loss, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    f = differentiated(loss, names, BATCHED)
    f(X, W, S)  # checks it
    by_transform = Mock(side_effect=torch.func.grad_and_value)
    monkeypatch.setattr(torch.func, "grad_and_value", by_transform)
    f(X, W, S)
    assert by_transform.called == ((loss, names) in BY_TRANSFORM)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_the_gradients_are_the_same_where_nothing_is_recorded(mode: type) -> None:
    f = differentiated(sharded, "xws", BATCHED)
    expected = f(X, W, S)
    with mode():
        w = W.clone()  # an inference tensor, in that mode
        found = f(X, w, S)
    for tensors in (found, f(X, w, S)):
        for actual, wanted in zip(tensors, expected, strict=True):
            torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_what_a_function_returns_beside_its_loss_is_equal_on_ranks_as_before() -> None:
    """It is made of each rank's copy of a parameter."""

    def body(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        def first(w: Tensor) -> tuple[Tensor, Tensor]:
            return of_one_rank_of_dp(x, w, s), w.sin()

        (_, sines), found = value_and_grad(first, has_aux=True)(w)
        once = convert(sines, "dp", src=R, dst=I)

        def second(s: Tensor) -> Tensor:
            h = convert(s.sum(), "tp", src=I, dst=R) * once
            y: Tensor = all_reduce(h.square().sum(), "tp", dst=I)
            return y

        value, gradient = value_and_grad(second)(s)
        return once, value, gradient, per_rank(found), per_rank(gradient)

    specs = P(None, "tp"), P(), P(), P(AXES), P(AXES)
    f, by_rank = (
        shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=specs) for mesh in (BATCHED, BY_RANK)
    )
    for actual, wanted in zip(f(X, W, S), by_rank(X, W, S), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)


def test_a_gradient_that_is_differentiated_from_outside_leads_there() -> None:
    def body(x: Tensor, w: Tensor, s: Tensor) -> tuple[Tensor, ...]:
        found = grad(lambda w: sharded(x, w, s))(w.detach())
        return value_and_grad(sharded)(x, w, s)[0], per_rank(found)

    specs = P(), P(AXES)
    outcomes = []
    for mesh in (BATCHED, BY_RANK):
        x = X.clone().requires_grad_()
        value, found = shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=specs)(x, W, S)
        outcomes.append(torch.autograd.grad(value + found.sin().sum(), x)[0])
    torch.testing.assert_close(*outcomes, rtol=1e-12, atol=1e-12)


def of_equal_numbers(x: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
    """Each rank has made them by itself, as many as it has of another value."""

    def largest_of_dp(ones: Tensor) -> Tensor:
        y = ones.sin().sum() * (1 + axis_index("dp"))
        return all_reduce(y, "dp", op="max", dst=I)

    own = convert(x, "tp", src=I, dst=R) * axis_index("tp")
    value, found = value_and_grad(largest_of_dp)(torch.ones_like(own))
    return [value, found]


def beside_what_nothing_depends_on(x: Tensor, w: Tensor, s: Tensor) -> list[Tensor]:
    """The gradient of what each rank has by itself may be zero on all of them."""

    def loss(leaves: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return leaves[1].sin().sum(), leaves[0].cos()

    (value, cosines), found = value_and_grad(loss, has_aux=True)((x, s))
    return [value, cosines, *found]


@pytest.mark.parametrize("made", [of_equal_numbers, beside_what_nothing_depends_on])
def test_leaves_are_each_ranks_own_where_their_types_say_so(
    made: Callable[..., list[Tensor]], monkeypatch: pytest.MonkeyPatch
) -> None:
    used = Mock(side_effect=Ranks.gradients)
    monkeypatch.setattr(Ranks, "gradients", lambda *args: used(*args))
    outcomes = [
        shard_map(
            lambda *values: tuple(map(per_rank, made(*values))),
            mesh=mesh,
            in_specs=SPECS,
            out_specs=P(AXES),
        )(X, W, S)
        for mesh in (BATCHED, BY_RANK)
    ]
    assert used.call_count == 1
    for actual, wanted in zip(*outcomes, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-12, atol=1e-12)

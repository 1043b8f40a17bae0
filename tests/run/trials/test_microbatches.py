"""check="global": loops over microbatches of a batch that ranks share, which are tried."""

from collections.abc import Callable, Mapping
from typing import Any, Final

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


def mean(g: Tensor) -> Tensor:
    return all_reduce(g, "dp", op="mean", dst=I)


def total(x: Tensor) -> Tensor:
    return all_reduce(x.sum(), "dp", dst=I)


def added(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    acc = torch.zeros_like(w)
    for mb in x.chunk(COUNT):
        acc = acc + grad(lambda w, mb=mb: loss(w, mb), w) / COUNT  # type: ignore[misc]
    return mean(acc)


def by_backward(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    for mb in x.chunk(COUNT):
        (loss(leaf, mb) / COUNT).backward()
    assert leaf.grad is not None
    return mean(leaf.grad)


def concatenated(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.cat([(mb @ w).softmax(-1) for mb in x.chunk(COUNT)])
    return all_reduce(rows.T @ y, "dp", dst=I)


def by_each(f: Callable[..., Tensor], dims: Any = 0) -> Callable[..., Tensor]:
    found: Callable[..., Tensor] = torch.func.vmap(f, dims)
    return found


def divided(x: Tensor) -> Tensor:
    return x.view(COUNT, -1, x.shape[1])


def each(w: Tensor, x: Tensor) -> Tensor:
    """Computes the gradient of each microbatch, of which each rank has an addend."""
    return by_each(torch.func.grad(loss), (None, 0))(w, divided(x))


def by_vmap(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return mean(each(w, x).mean(0))


def viewed(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    found = [grad(lambda w, mb=mb: loss(w, mb), w) for mb in divided(x)]  # type: ignore[misc]
    return mean(torch.stack(found).mean(0))


def stacked_losses(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def of(w: Tensor) -> Tensor:
        losses = [total(mb @ w - t) for mb, t in zip(divided(x), y.chunk(COUNT), strict=True)]
        return torch.stack(losses).mean()

    return all_reduce(grad(of, w), "dp", dst=I)


def gradients_of_rows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    by_rows = by_each(lambda mb: grad(lambda mb: (mb @ w).cos().sum(), mb))(divided(x))
    return all_reduce(by_rows.reshape(x.shape).T @ y, "dp", dst=I)


RIGHT: Final = [
    added,
    by_backward,
    concatenated,
]
STACKED: Final = [
    *(by_vmap, viewed, stacked_losses, gradients_of_rows),
]


def looped(of: Callable[[Tensor, int, Tensor, Tensor], Tensor]) -> Step:
    """A sum over the loop of what `of` makes of the sum so far, the number, the rows and w."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        acc = torch.zeros_like(w)
        for i, mb in enumerate(x.chunk(COUNT)):
            acc = of(acc, i, mb, w)
        return all_reduce(acc, "dp", dst=I)

    return step


def sums(w: Tensor, mb: Tensor) -> Tensor:
    return grad(lambda w: (mb @ w).square().sum(), w)


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


def gradient_of_two(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, second, third = x.chunk(COUNT)

    def of_two(w: Tensor) -> Tensor:
        return (first @ w).square().sum() + (second @ w).square().sum()

    return all_reduce(grad(of_two, w) + sums(w, third), "dp", dst=I)


WRONG: Final[list[Step]] = [
    looped(lambda acc, i, mb, w: acc + (i + 1) * sums(w, mb)),
    looped(lambda acc, i, mb, w: (0.9 * acc if i else acc) + sums(w, mb)),
    looped(lambda acc, i, mb, w: sums(w, mb)),
    detached_in_one,
    *(with_a_hook, added_without_gradient),
]
"""Loops that depend on how rows are divided."""


def stacked(of: Callable[[Tensor], Tensor], mean_of: bool = True) -> Step:
    """Makes a step of what `of` makes of the gradients of all microbatches, [n, ...]."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        found = of(each(w, x))
        return mean(found) if mean_of else found

    return step


def of_rows(of: Callable[[Tensor], Tensor]) -> Step:
    """Makes a step of what `of` makes of the rows of all microbatches, [n, rows, ...]."""

    def step(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        return all_reduce(of(divided(x)).T @ y, "dp", dst=I)

    return step


WRONG_STACKED: Final[list[Step]] = [
    stacked(lambda g: g.sum(0), mean_of=False),
    stacked(lambda g: (g * torch.arange(1.0, 4.0)[:, None, None]).sum(0)),
    stacked(lambda g: mean(g).square().sum(0), mean_of=False),
    stacked(lambda g: mean(g).amax(0), mean_of=False),
    stacked(lambda g: g[:-1].sum(0)),
    stacked(lambda g: g[0]),
    stacked(lambda g: (g - g.mean(0)).square().sum(0)),
    stacked(lambda g: (g.softmax(0) * g).sum(0)),
    of_rows(lambda x: x.sum(0).repeat(3, 1)),
    of_rows(lambda x: x.transpose(0, 1).flatten(0, 1)),
    of_rows(lambda x: (x - x.mean((0, 1))).flatten(0, 1)),
    of_rows(lambda x: x.roll(1, 0).flatten(0, 1)),
    of_rows(lambda x: (x - all_reduce(x.mean(1), "dp", op="mean", dst=R)[:, None]).flatten(0, 1)),
]
"""Steps that depend on how rows are divided into microbatches along a dim."""

RIGHT_STACKED: Final[list[Step]] = [
    stacked(lambda g: g.cumsum(0)[-1]),
    stacked(lambda g: torch.stack([g[1], g[0], g[2]]).sum(0)),
]


def on(step: Step, ranks: int, check: str | bool) -> Tensor:
    mesh = make_mesh((ranks,), ("dp",), kind="simulated", simulate="ranks")
    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
    found: Tensor = shard_map(step, mesh=mesh, check=check, **specs)(W, X, Y)  # type: ignore[call-overload]
    return found


@pytest.mark.sample(4)
@pytest.mark.parametrize("step", [*RIGHT, *STACKED, *RIGHT_STACKED, gradient_of_two])
def test_a_loop_over_microbatches_gives_what_one_device_gives(step: Step) -> None:
    torch.testing.assert_close(on(step, 2, "global"), on(step, 1, True))


@pytest.mark.sample(8)
@pytest.mark.parametrize("step", [*WRONG, *WRONG_STACKED])
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

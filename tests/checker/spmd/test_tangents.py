"""Forward over reverse in a body, under check="global": numbers decide, against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from shardmap_torch import (
    I,
    P,
    R,
    all_reduce,
    convert,
    make_mesh,
    shard_map,
)
from tests.checker.support.one_device import numbers

pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own

Body = Callable[..., Tensor]

RANKS: Final = make_mesh((2, 2), ("a", "b"), kind="simulated", simulate="vmap")
ONE: Final = make_mesh((1, 1), ("a", "b"), kind="simulated", simulate="vmap")
ARGS: Final = (numbers(3, 4), numbers(3, 4).cos(), numbers(8, 3))
"""Weights, a direction, and rows."""
OWN: Final = (P(), P(), P("a"))


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "a", dst=I)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().sum()


def pushed(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    found: Tensor = jvp(f, (w,), (v,))[1]
    return found


def product(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The product of a Hessian with a direction, of which each rank has an addend."""
    return pushed(grad(lambda w: loss(w, x)), w, v)


def mixed(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Moves the rows, and looks how the gradient of the weights changes."""
    return total(pushed(lambda x: grad(loss)(w, x), x, x.cos()))


def laplacian(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The sum of second derivatives by the inputs at each sample, as in a physical loss."""

    def at(x: Tensor) -> Tensor:
        found: Tensor = hessian(lambda x: (x @ w).tanh().sum())(x)
        return torch.einsum("ii", found)

    found: Tensor = vmap(at)(x)
    return found


RIGHT: Final[dict[str, tuple[Body, Any, P]]] = {
    "mean": (
        lambda w, v, x: all_reduce(
            pushed(grad(lambda w: (x @ w).tanh().mean()), w, v), "a", op="mean", dst=I
        ),
        OWN,
        P(),
    ),
    "of rows and weights": (mixed, OWN, P()),
    "of each sample": (
        lambda w, v, x: vmap(lambda x: pushed(grad(lambda x: loss(w, x)), x, x.cos()))(x),
        OWN,
        P("a"),
    ),
    "jacobian of each sample": (
        lambda w, v, x: vmap(jacrev(lambda x: (x @ w).tanh()))(x),
        OWN,
        P("a"),
    ),
    "laplacian of each sample": (laplacian, OWN, P("a")),
}


def outcome(mesh: Any, name: str, check: Any) -> Tensor:
    body, in_specs, out_specs = RIGHT[name]
    f = shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)
    y: Tensor = f(*ARGS)
    return y


@pytest.mark.sample(2, "laplacian of each sample")
@pytest.mark.parametrize("name", RIGHT)
def test_a_product_with_a_hessian_is_that_of_one_device(name: str) -> None:
    torch.testing.assert_close(outcome(RANKS, name, "global"), outcome(ONE, name, False))


def test_forward_mode_through_a_collective_is_that_of_one_device() -> None:
    def body(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        return pushed(grad(lambda w: total(loss(convert(w, "a", src=I, dst=R), x))), w, v)

    f = shard_map(body, mesh=RANKS, in_specs=OWN, out_specs=P(), check="global")
    torch.testing.assert_close(f(*ARGS), product(*ARGS))


def test_reverse_mode_through_a_collective_is_that_of_one_device() -> None:
    def body(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        slope = grad(lambda w: total(loss(convert(w, "a", src=I, dst=R), x)))
        found: Tensor = grad(lambda w: (slope(w) * v).sum())(w)
        return found

    f = shard_map(body, mesh=RANKS, in_specs=OWN, out_specs=P(), check="global")
    torch.testing.assert_close(f(*ARGS), product(*ARGS))

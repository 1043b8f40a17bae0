"""Forward over reverse in a body, under check="global", against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from shardmap_torch import (
    Function,
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    check_program,
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
SHARDED: Final = (P(None, "b"), P(None, "b"), P("a"))


def total(x: Tensor) -> Tensor:
    return all_reduce(x, "a", dst=I)


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().sum()


def global_loss(w: Tensor, x: Tensor) -> Tensor:
    return total(loss(convert(w, "a", src=I, dst=R), x))


def norm(w: Tensor, x: Tensor) -> Tensor:
    """Sums over columns that "b" shards, and rows that "a" shards."""
    columns = all_reduce((x @ w).tanh().sum(1), "b", dst=I)
    return total(columns.square().sum())


def pushed(f: Callable[[Tensor], Tensor], w: Tensor, v: Tensor) -> Tensor:
    found: Tensor = jvp(f, (w,), (v,))[1]
    return found


def product(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The product of a Hessian with a direction, of which each rank has an addend."""
    return pushed(grad(lambda w: loss(w, x)), w, v)


def curvature(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Steps along a direction by the curvature there, as a Newton method does."""
    both = total(product(w, v, x)), total(grad(loss)(w, x))
    return w - v * (both[1] * v).sum() / (1 + (both[0] * v).sum().abs())


def mixed(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """Moves the rows, and looks how the gradient of the weights changes."""
    return total(pushed(lambda x: grad(loss)(w, x), x, x.cos()))


def twice(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return total(pushed(lambda w: product(w, v, x), w, v))


def laplacian(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    """The sum of second derivatives by the inputs at each sample, as in a physical loss."""

    def at(x: Tensor) -> Tensor:
        found: Tensor = hessian(lambda x: (x @ w).tanh().sum())(x)
        return torch.einsum("ii", found)

    found: Tensor = vmap(at)(x)
    return found


RIGHT: Final[dict[str, tuple[Body, Any, P]]] = {
    "of a local loss": (lambda w, v, x: total(product(w, v, x)), OWN, P()),
    "of a global loss": (
        lambda w, v, x: pushed(grad(lambda w: global_loss(w, x)), w, v),
        OWN,
        P(),
    ),
    "of a gradient's sum": (
        lambda w, v, x: pushed(lambda w: total(grad(loss)(w, x)), w, v),
        OWN,
        P(),
    ),
    "of sharded weights": (
        lambda w, v, x: total(pushed(grad(lambda w: norm(w, x)), w, v)),
        SHARDED,
        P(None, "b"),
    ),
    "by rows": (
        lambda w, v, x: pushed(grad(lambda x: global_loss(w, x)), x, x.cos()),
        OWN,
        P("a"),
    ),
    "mean": (
        lambda w, v, x: all_reduce(
            pushed(grad(lambda w: (x @ w).tanh().mean()), w, v), "a", op="mean", dst=I
        ),
        OWN,
        P(),
    ),
    "Newton": (curvature, OWN, P()),
    "of rows and weights": (mixed, OWN, P()),
    "third derivative": (twice, OWN, P()),
    "hessian": (lambda w, v, x: total(hessian(lambda w: loss(w, x))(w)), OWN, P()),
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


@pytest.mark.parametrize("name", RIGHT)
def test_a_product_with_a_hessian_is_that_of_one_device(name: str) -> None:
    torch.testing.assert_close(outcome(RANKS, name, "global"), outcome(ONE, name, False))


class Clipped(Function):
    """Clips a gradient by the norm of what a rank has of it."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        pass

    @staticmethod
    def backward(ctx: Any, g: Any) -> Any:
        return g / (1 + g.square().sum())

    @staticmethod
    def jvp(ctx: Any, tangent: Any) -> Any:
        return tangent.clone()


def first_half(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
    return total(product(w, v, x.chunk(2)[0]))


WRONG: Final[dict[str, tuple[Body, str]]] = {
    "not summed": (lambda w, v, x: w - product(w, v, x), "once per rank"),
    "squared before its sum": (
        lambda w, v, x: total(product(w, v, x).square()),
        "cannot be applied to a pending sum",
    ),
    "summed twice": (lambda w, v, x: total(total(product(w, v, x))), "equal on all ranks"),
    "the sum of means": (
        lambda w, v, x: total(pushed(grad(lambda w: (x @ w).tanh().mean()), w, v)),
        "the sum of the means of all parts",
    ),
    "along an addend of a direction": (
        lambda w, v, x: total(product(w, grad(loss)(w, x), x)),
        "pending sum|Partial|nothing is known",
    ),
    "along another direction on each rank": (
        lambda w, v, x: total(product(w, v * axis_index("a"), x)),
        "every rank has a value of its own",
    ),
    "along another direction in the backward alone": (
        # A power of 0: the tangent of the forward is zero, whatever the direction.
        lambda w, v, x: total(pushed(grad(lambda w: w.sum() * x.sum()), w, v * axis_index("a"))),
        "every rank has a value of its own|nothing is known|equal on all ranks",
    ),
    "of half of the rows of each rank": (first_half, "is not what it is on one device"),
    "through a backward of one's own": (
        lambda w, v, x: total(pushed(grad(lambda w: loss(Clipped.apply(w), x)), w, v)),
        "the backward of Clipped runs, and what is written for a backward is not compared",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_product_that_is_another_on_one_device_is_refused(name: str) -> None:
    body, text = WRONG[name]
    f = shard_map(body, mesh=RANKS, in_specs=OWN, out_specs=P(), check="global")
    with pytest.raises(ShardTypeError, match=text):
        check_program(f, *ARGS)


def test_a_typed_copy_of_a_direction_adds_nothing_to_its_product() -> None:
    """A direction that is gathered has a varying type, and is equal on all ranks."""

    def body(w: Tensor, v: Tensor, x: Tensor) -> Tensor:
        v = all_gather(v, "b", dim=1, dst=R)
        return total(product(w, v, x))

    specs = (P(), P(None, "b"), P("a"))
    f = shard_map(body, mesh=RANKS, in_specs=specs, out_specs=P(), check="global")
    w, v, x = ARGS
    expected = pushed(lambda w: grad(loss)(w, x), w, v)
    torch.testing.assert_close(f(*ARGS), expected)

"""check="global": loops over microbatches of a batch that ranks share, which are tried."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    make_mesh,
    shard_map,
    vjp,
)


def grad(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


def loss(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().mean()


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

"""check="global": what is equal on all ranks may be added to means of parts that are averaged."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, ShardTypeError, all_reduce, axis_size, make_mesh, shard_map

Step = Callable[[Tensor, Tensor], Tensor]
X: Final = torch.linspace(-1, 2, 72, dtype=torch.float64).sin().reshape(12, 6)
W: Final = torch.linspace(-2, 1, 6, dtype=torch.float64).cos()


def mean(value: Tensor) -> Tensor:
    return all_reduce(value, "dp", op="mean", dst=I)


def data(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().mean()


def decay(w: Tensor) -> Tensor:
    return 0.1 * w.square().sum()


def regularized(w: Tensor, x: Tensor) -> Tensor:
    return data(w, x) + decay(w)


def in_place(w: Tensor, x: Tensor) -> Tensor:
    value = data(w, x).clone()
    value -= 1
    value += decay(w)
    return mean(value)


def gradient(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


RIGHT: Final[dict[str, Step]] = {
    "one minus a mean": lambda w, x: mean(1 - data(w, x)),
    "a mean plus one": lambda w, x: mean(2 * (data(w, x) + 1)),
    "in place": in_place,
    "a regularized loss": lambda w, x: mean(regularized(w, x)),
    "its gradient, averaged": lambda w, x: mean(gradient(lambda w: regularized(w, x), w)),
    "the gradient of its average": lambda w, x: all_reduce(
        gradient(lambda w: mean(regularized(w, x)), w), "dp", dst=I
    ),
    "stacked losses": lambda w, x: mean(torch.stack([data(w, x), decay(w)])),
    "a part of what is added": lambda w, x: all_reduce(
        (x @ w).sum() + decay(w) / axis_size("dp"), "dp", dst=I
    ),
}

WRONG: Final[dict[str, tuple[Step, str]]] = {
    "summed": (
        lambda w, x: all_reduce(regularized(w, x), "dp", dst=I),
        "the result out is not what it is on one device: over 'dp' it is the sum of the means",
    ),
    "squared before": (
        lambda w, x: mean((1 - data(w, x)).square()),
        "over 'dp' it is the mean of a rank's part",
    ),
    "added to a sum": (
        lambda w, x: mean((x @ w).sum() + decay(w)),
        "an addend that is equal on all ranks would be counted once per rank",
    ),
    "a number added to a sum": (lambda w, x: all_reduce((x @ w).sum() + 1, "dp", dst=I), "add"),
    "multiplied": (lambda w, x: mean(data(w, x) * data(w, x)), "mul is not what it is"),
    "of a regularized sum": (
        lambda w, x: mean(gradient(lambda w: (x @ w).square().sum() + decay(w), w)),
        "is not what it is on one device",
    ),
}


@pytest.mark.parametrize("dp", [2, 3])
@pytest.mark.parametrize("name", RIGHT)
def test_what_is_equal_on_all_ranks_is_averaged_with_the_means(name: str, dp: int) -> None:
    step = RIGHT[name]
    one = make_mesh((1,), ("dp",), kind="simulated", simulate="ranks")
    want = shard_map(step, mesh=one, in_specs=(P(), P("dp")), out_specs=P())(W, X)
    mesh = make_mesh((dp,), ("dp",), kind="simulated", simulate="ranks")
    mapped = shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check="global")
    torch.testing.assert_close(mapped(W, X), want)


@pytest.mark.parametrize("name", WRONG)
def test_what_is_counted_another_number_of_times_is_refused(name: str) -> None:
    step, text = WRONG[name]
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    mapped = shard_map(step, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check="global")
    with pytest.raises(ShardTypeError) as caught:
        mapped(W, X)
    assert text in str(caught.value)

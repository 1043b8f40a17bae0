"""check="global": what is equal on all ranks may be added to means of parts that are averaged."""

import random
from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch import I, P, R, ShardTypeError, all_reduce, axis_size, make_mesh, shard_map
from tests.support.fuzzing import sized

Step = Callable[[Tensor, Tensor], Tensor]
X: Final = torch.linspace(-1, 2, 72, dtype=torch.float64).sin().reshape(12, 6)
W: Final = torch.linspace(-2, 1, 6, dtype=torch.float64).cos()


def mean(value: Tensor) -> Tensor:
    return all_reduce(value, "dp", op="mean", dst=I)


def data(w: Tensor, x: Tensor) -> Tensor:
    return (x @ w).tanh().square().mean()


def decay(w: Tensor) -> Tensor:
    return 0.1 * w.square().sum()


def gradient(f: Callable[[Tensor], Tensor], w: Tensor) -> Tensor:
    found: Tensor = torch.func.grad(f)(w)
    return found


# -------------------------------------------------------------------------------- random sums

LEAVES: Final[tuple[Step, ...]] = (
    data,
    lambda w, x: (x @ w).sin().mean(),
    lambda w, x: (x @ w).sum(),
    lambda w, x: (x @ w).square().sum() / x.shape[0],
    lambda w, x: decay(w),
    lambda w, x: decay(w) / axis_size("dp"),
    lambda w, x: decay(w) * axis_size("dp"),
    lambda w, x: w.new_zeros(()),
    lambda w, x: all_reduce(data(w, x), "dp", op="mean", dst=R),
)
COMBINED: Final[tuple[Callable[[Tensor, Tensor], Tensor], ...]] = (
    lambda a, b: a + b,
    lambda a, b: a - 2 * b,
    lambda a, b: torch.stack([a, b]).sum(),
    lambda a, b: a.clone().add_(b),
    lambda a, b: a * b,
    lambda a, b: torch.where(b > a, a, b),
)
CHANGED: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    lambda a: 1 - a,
    lambda a: 3 * a,
    lambda a: a + 1,
    lambda a: a / 2,
    lambda a: -a,
    Tensor.sin,
)
REDUCED: Final[tuple[Callable[[Tensor], Tensor], ...]] = (
    mean,
    lambda a: all_reduce(a, "dp", dst=I),
    lambda a: all_reduce(a / axis_size("dp"), "dp", dst=I),
)


def drawn(draw: random.Random) -> Step:
    """A random sum, some steps of which are right on one device only, or its gradient."""
    steps = [draw.randrange(len(LEAVES)) for _ in range(draw.choice((2, 2, 3)))]
    combined = [draw.choice(COMBINED[:4] if draw.random() < 0.8 else COMBINED) for _ in steps]
    changed = [draw.choice(CHANGED[:5]) if draw.random() < 0.4 else Tensor.clone for _ in steps]
    reduced, inside = draw.choice(REDUCED), draw.random() < 0.3

    def value(w: Tensor, x: Tensor) -> Tensor:
        total, *parts = [change(LEAVES[n](w, x)) for n, change in zip(steps, changed, strict=True)]
        for combine, part in zip(combined, parts, strict=False):
            total = combine(total, part)
        return total

    def differentiated(w: Tensor, x: Tensor) -> Tensor:
        if inside:
            found = gradient(lambda w: reduced(value(w, x)), w)
            return all_reduce(found, "dp", dst=I)
        return reduced(gradient(lambda w: value(w, x), w))

    return differentiated if draw.random() < 0.6 else lambda w, x: reduced(value(w, x))


def test_a_random_sum_that_is_accepted_is_that_of_one_device() -> None:
    one = make_mesh((1,), ("dp",), kind="simulated", simulate="ranks")
    mesh = make_mesh((2,), ("dp",), kind="simulated", simulate="ranks")
    specs: Any = {"in_specs": (P(), P("dp")), "out_specs": P()}
    accepted = 0
    for seed in range(sized(18, 1_500)):
        step = drawn(random.Random(seed))
        try:
            got = shard_map(step, mesh=mesh, check="global", **specs)(W, X)
        except ShardTypeError:
            continue
        accepted += 1
        want = shard_map(step, mesh=one, check=True, **specs)(W, X)
        torch.testing.assert_close(got, want, msg=str(seed))
    assert accepted > sized(1, 150)

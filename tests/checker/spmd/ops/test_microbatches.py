"""check="global": loops over microbatches of a batch that ranks share."""

from collections.abc import Callable
from functools import reduce
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
    convert,
    make_mesh,
    shard_map,
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


def added_in_place(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    acc = torch.zeros_like(w)
    for mb in x.chunk(COUNT):
        acc += grad(lambda w, mb=mb: loss(w, mb), w)  # type: ignore[misc]
    acc /= COUNT
    return mean(acc)


def sliced(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = x.shape[0] // COUNT
    acc = torch.zeros_like(w)
    for i in range(COUNT):
        mb = x[i * rows : (i + 1) * rows]
        acc = acc + grad(lambda w, mb=mb: loss(w, mb), w) / COUNT  # type: ignore[misc]
    return mean(acc)


def by_backward(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    for mb in x.chunk(COUNT):
        (loss(leaf, mb) / COUNT).backward()
    assert leaf.grad is not None
    return mean(leaf.grad)


def by_autograd(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    found = [torch.autograd.grad(loss(leaf, mb) / COUNT, leaf)[0] for mb in x.chunk(COUNT)]
    return mean(reduce(torch.add, found))


def with_targets(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def of(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
        mask = torch.ones(4, 4, dtype=w.dtype).tril()
        return total(((x @ mask @ w).softmax(-1) - y).square())

    acc: Tensor | float = 0.0
    for a, b in zip(x.chunk(COUNT), y.chunk(COUNT), strict=True):
        acc = acc + grad(lambda w, a=a, b=b: of(w, a, b), w)  # type: ignore[misc, operator]
    assert isinstance(acc, Tensor)
    return all_reduce(acc, "dp", dst=I)


def concatenated(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.cat([(mb @ w).softmax(-1) for mb in x.chunk(COUNT)])
    return all_reduce(rows.T @ y, "dp", dst=I)


RIGHT: Final = [sliced, added, added_in_place, by_backward, by_autograd, with_targets, concatenated]


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


def with_a_neighbour(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, second, third = x.chunk(COUNT)
    return all_reduce(first.T @ second @ w + second.T @ third @ w, "dp", dst=I)


def of_one(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    return all_reduce(sums(w, x.chunk(COUNT)[0]), "dp", dst=I)


def paired_with_own_rows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    own = x.cumsum(1)[:, :4]
    acc = torch.zeros_like(w)
    for mb in x.chunk(COUNT):
        acc = acc + mb.T @ all_gather(own, "dp", dim=0, dst=R)[: mb.shape[0]] @ w
    return all_reduce(acc, "dp", dst=I)


def squares_of_sums(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    found = [grad(lambda w, mb=mb: total(mb @ w).square(), w) for mb in x.chunk(COUNT)]  # type: ignore[misc]
    return all_reduce(reduce(torch.add, found), "dp", dst=I)


def normalised(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    def of(w: Tensor, mb: Tensor) -> Tensor:
        centred = mb @ w - all_reduce((mb @ w).mean(0), "dp", op="mean", dst=R)
        return total(centred.square())

    found = [grad(lambda w, mb=mb: of(w, mb), w) for mb in x.chunk(COUNT)]  # type: ignore[misc]
    return all_reduce(reduce(torch.add, found), "dp", dst=I)


def in_another_order(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = torch.cat([mb @ w for mb in reversed(x.chunk(COUNT))])
    return all_reduce(rows.T @ y, "dp", dst=I)


def of_two_leaves(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    one, other = w.detach().requires_grad_(), w.detach().clone().requires_grad_()
    acc = torch.zeros_like(w)
    for i, mb in enumerate(x.chunk(COUNT)):
        value = ((mb @ one).square() * (mb @ other)).sum()
        acc = acc + torch.autograd.grad(value, one if i else other)[0]
    return all_reduce(acc, "dp", dst=I)


def written_to_rows(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    buffer = torch.zeros(COUNT, 4, 5, dtype=w.dtype)
    for i, mb in enumerate(x.chunk(COUNT)):
        buffer[i] = all_reduce(sums(w, mb), "dp", dst=R)
    return (buffer.cumsum(0)).sum(0)


def other_rows_twice(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().requires_grad_()
    first, *_ = x.chunk(COUNT)
    for mb in (first, first):
        (mb @ leaf).square().sum().backward()
    assert leaf.grad is not None
    return all_reduce(leaf.grad, "dp", dst=I)


def with_a_hook(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    leaf = w.detach().clone().requires_grad_()

    def squared(g: Tensor) -> Tensor:
        return convert(all_reduce(g, "dp", dst=R).square(), "dp", src=R, dst=Partial)

    leaf.register_hook(squared)
    for mb in x.chunk(COUNT):
        (mb @ leaf).sum().backward()
    assert leaf.grad is not None
    return all_reduce(leaf.grad, "dp", dst=I)


def sliced_by_the_rank_s_size(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    acc = torch.zeros_like(w)
    for i in range(COUNT):
        acc = acc + sums(w, x[2 * i : 2 * i + 2])
    return all_reduce(acc, "dp", dst=I)


def sliced_twice(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    rows = x.shape[0] // COUNT
    found = [sums(w, x[: i * rows + rows][-rows:]) for i in (0, 1, 1)]
    return all_reduce(reduce(torch.add, found), "dp", dst=I)


def of_a_sum_and_a_part(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grams = [mb.T @ mb for mb in x.chunk(COUNT)]
    operands = [grams[0], grams[0] + grams[1] + grams[2], grams[2]]
    acc = torch.zeros_like(w[:, :1] @ w[:1, :4])
    for each in operands:
        acc = acc + 2 * each
    return all_reduce(acc, "dp", dst=I)


WRONG: Final[list[Step]] = [
    looped(lambda acc, i, mb, w: acc + (i + 1) * sums(w, mb)),
    looped(lambda acc, i, mb, w: (0.9 * acc if i else acc) + sums(w, mb)),
    looped(lambda acc, i, mb, w: (acc + sums(w, mb)) if i else acc),
    looped(lambda acc, i, mb, w: acc + sums(w if i else 2 * w, mb)),
    looped(lambda acc, i, mb, w: sums(w, mb)),
    with_a_neighbour,
    of_one,
    paired_with_own_rows,
    squares_of_sums,
    normalised,
    in_another_order,
    of_two_leaves,
    written_to_rows,
    other_rows_twice,
    with_a_hook,
    sliced_by_the_rank_s_size,
    sliced_twice,
    of_a_sum_and_a_part,
]


def on(step: Step, ranks: int, check: str | bool) -> Tensor:
    mesh = make_mesh((ranks,), ("dp",), kind="simulated", simulate="ranks")
    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
    found: Tensor = shard_map(step, mesh=mesh, check=check, **specs)(W, X, Y)  # type: ignore[call-overload]
    return found


@pytest.mark.parametrize("step", RIGHT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_over_microbatches_gives_what_one_device_gives(step: Step, ranks: int) -> None:
    torch.testing.assert_close(on(step, ranks, "global"), on(step, 1, True))


@pytest.mark.parametrize("number", range(len(WRONG)))
def test_a_loop_that_depends_on_how_rows_are_divided_is_refused(number: int) -> None:
    with pytest.raises(ShardTypeError, match="check='global'"):
        on(WRONG[number], 2, "global")

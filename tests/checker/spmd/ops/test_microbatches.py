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
    found = [sums(w, x[i * rows : (i + 1) * rows]) for i in (0, 1, 1)]
    return all_reduce(reduce(torch.add, found), "dp", dst=I)


def square_of_two(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, second, third = (all_reduce(sums(w, mb), "dp", dst=R) for mb in x.chunk(COUNT))
    return convert((first + second).square() + third, "dp", src=R, dst=I)


def divided_again(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    found = [sums(w, half) for mb in x.chunk(COUNT) for half in mb.chunk(2)]
    return all_reduce(reduce(torch.add, found), "dp", dst=I)


def gradient_of_two(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    first, second, third = x.chunk(COUNT)

    def of_two(w: Tensor) -> Tensor:
        return (first @ w).square().sum() + (second @ w).square().sum()

    return all_reduce(grad(of_two, w) + sums(w, third), "dp", dst=I)


def of_a_sum_and_a_part(w: Tensor, x: Tensor, y: Tensor) -> Tensor:
    grams = [mb.T @ mb for mb in x.chunk(COUNT)]
    operands = [grams[0], grams[0] + grams[1] + grams[2], grams[2]]
    acc = torch.zeros_like(w[:, :1] @ w[:1, :4])
    for each in operands:
        acc = acc + 2 * each
    return all_reduce(acc, "dp", dst=I)


ADD_UP: Final = (
    "Fix: add up, or concatenate in order, the same expression of all of them, as in acc = acc + "
    "torch.func.grad(loss)(w, microbatch); average with a factor that is the same for each. "
    "If the dim is no batch, gather it before it is divided, with all_gather."
)
GATHER: Final = "Fix: gather it first, with all_gather."
COMBINES: Final = ("add", "it combines microbatches", ADD_UP)


def unfinished(which: str) -> tuple[str, str, str]:
    reason = f"it depends on microbatches {which} of 3, which have other rows on one device"
    return "the result out", reason, ADD_UP


WRONG: Final[list[tuple[Step, tuple[str, str, str]]]] = [
    (looped(lambda acc, i, mb, w: acc + (i + 1) * sums(w, mb)), COMBINES),
    (looped(lambda acc, i, mb, w: (0.9 * acc if i else acc) + sums(w, mb)), COMBINES),
    (looped(lambda acc, i, mb, w: (acc + sums(w, mb)) if i else acc), unfinished("1, 2")),
    (looped(lambda acc, i, mb, w: acc + sums(w if i else 2 * w, mb)), COMBINES),
    (looped(lambda acc, i, mb, w: sums(w, mb)), unfinished("2")),
    (with_a_neighbour, ("mm", "it combines microbatches", ADD_UP)),
    (of_one, unfinished("0")),
    (paired_with_own_rows, ("slice", "it takes a part of dim 0, which is sharded", GATHER)),
    (squares_of_sums, COMBINES),
    (normalised, COMBINES),
    (in_another_order, ("cat", "it combines microbatches", ADD_UP)),
    (of_two_leaves, COMBINES),
    (
        written_to_rows,
        ("select", "some of its memory depends on some microbatches only", ADD_UP),
    ),
    (
        other_rows_twice,
        (
            "a gradient",
            "it is added to a gradient in .grad that is not the same expression of other "
            "microbatches",
            ADD_UP,
        ),
    ),
    (
        with_a_hook,
        (
            "a gradient",
            "it is a gradient of microbatches 0 of 3, and code of your own has worked on it",
            "Fix: apply it to the sum of all microbatches.",
        ),
    ),
    (sliced_by_the_rank_s_size, ("slice", "it takes a part of dim 0, which is sharded", GATHER)),
    (sliced_twice, COMBINES),
    (square_of_two, ("pow", "it is not linear in microbatches 0, 1 of 3", ADD_UP)),
    (
        divided_again,
        (
            "split",
            "it divides a microbatch again",
            "Fix: divide the batch once, into all microbatches.",
        ),
    ),
    (
        gradient_of_two,
        (
            "a gradient",
            "it is the gradient of a loss of several microbatches",
            "Fix: take the gradient of each by itself, and add these up.",
        ),
    ),
    (
        of_a_sum_and_a_part,
        (
            "add",
            "it combines microbatches 0 of 3 with a value that is sharded over 'dp' and not "
            "divided into microbatches",
            "Fix: divide it in the same way.",
        ),
    ),
]
"""Loops that depend on how rows are divided: what is refused, why, and the repair."""


def on(step: Step, ranks: int, check: str | bool) -> Tensor:
    mesh = make_mesh((ranks,), ("dp",), kind="simulated", simulate="ranks")
    specs = {"in_specs": (P(), P("dp"), P("dp")), "out_specs": P()}
    found: Tensor = shard_map(step, mesh=mesh, check=check, **specs)(W, X, Y)  # type: ignore[call-overload]
    return found


@pytest.mark.parametrize("step", RIGHT)
@pytest.mark.parametrize("ranks", [2, 4])
def test_a_loop_over_microbatches_gives_what_one_device_gives(step: Step, ranks: int) -> None:
    torch.testing.assert_close(on(step, ranks, "global"), on(step, 1, True))


@pytest.mark.parametrize(("step", "expected"), WRONG)
def test_a_loop_that_depends_on_how_rows_are_divided_is_refused(
    step: Step, expected: tuple[str, str, str]
) -> None:
    what, reason, fix = expected
    with pytest.raises(ShardTypeError) as raised:
        on(step, 2, "global")
    first, *_, last = str(raised.value).splitlines()
    name = getattr(step, "__name__", "step")
    assert first == f"{name}: check='global': {what} is not what it is on one device: {reason}."
    assert last == fix

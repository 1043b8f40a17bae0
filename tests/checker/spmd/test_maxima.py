"""Gradients through maxima over a sharded dim, under global strictness, against one device."""

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    make_mesh,
    random,
    shard_map,
)
from tests.checker.support.one_device import (
    AXES,
    assert_is_one_device,
    assert_is_refused,
    numbers,
)
from tests.checker.support.softmax_programs import SEEDS, largest, outcome_of, total

VMAP: Final = make_mesh((2, 2), AXES, kind="simulated", simulate="vmap")

X: Final = torch.tensor([[2, 1, 2, 2], [0, 1, 0, 1], [1, 1, 1, 1], [0, 2, 1, 0]]).double()
"""Logits of which ranks have different numbers of the largest."""


def softmax(x: Tensor) -> Tensor:
    e = torch.exp(x - largest(x))
    return e / total(e)


def attention(x: Tensor) -> Tensor:
    """Divides late, after the product with the values of all shards."""
    e = torch.exp((x - largest(x)) / 0.5)
    values = x[:1].sin().expand(3, -1).T
    return (all_reduce(e @ values, "a", dst=R) / total(e)).sum(-1, keepdim=True) * x


def test_a_maximum_whose_gradient_cancels_out_may_have_it() -> None:
    spec = P(None, "a", replicate={"b"})
    assert_is_one_device(attention, (X,), spec, spec, VMAP)


def half_detached(x: Tensor) -> Tensor:
    e = torch.exp(x - largest(x))
    return e / total(e).detach()


def of_two_maxima(x: Tensor) -> Tensor:
    return torch.exp(x - largest(x)) / total(torch.exp(x - largest(2 * x)))


def returned(x: Tensor) -> Tensor:
    return softmax(x) + largest(x)


def without_grad_mode(x: Tensor) -> Tensor:
    e = torch.exp(x - largest(x))
    with torch.no_grad():
        s = total(e)
    return e / s


def gradient_of_one(x: Tensor) -> Tensor:
    """The gradient of the numerator alone is another one, and flows."""
    e = torch.exp(x - largest(x))
    (grad,) = torch.autograd.grad(
        all_reduce((e / total(e) * x).sum(), "a", dst=I), e, create_graph=True
    )
    return grad


WRONG: Final = (
    half_detached,
    *(of_two_maxima, returned, without_grad_mode, gradient_of_one),
)


@pytest.mark.sample(2)
@pytest.mark.parametrize("body", WRONG, ids=lambda body: str(body.__name__))
def test_a_gradient_of_a_maximum_that_does_not_cancel_is_refused(
    body: Callable[[Tensor], Tensor],
) -> None:
    spec, x = P(None, "a", invariant={"b"}), X.clone().requires_grad_()
    assert_is_refused(body, (x,), spec, spec, "the maximum or minimum over a sharded dim, from")


def test_random_softmaxes_that_are_accepted_equal_one_device() -> None:
    outcomes = Counter(map(outcome_of, SEEDS))
    assert not outcomes["wrong"], outcomes
    assert outcomes["right"] > outcomes["refused"] > 0, outcomes


def beside_a_choice(x: Tensor) -> Tensor:
    """Takes any of equal entries by a topk, and the maximum over rows that ranks share."""
    x = x / total(x.square().sum()).sqrt()
    x = x * all_reduce((x > 0).all().long(), "a", op="min", dst=R) + x
    return all_reduce((x.topk(1, 1).values * x + 1).amax(0), "a", op="max", dst=I)


def of_zeros(x: Tensor) -> Tensor:
    """Shares a gradient in other parts where a row is zero, and is right for all other numbers."""
    x = x * (x == all_gather(x, "a", dim=1, dst=R).amax(1, keepdim=True))
    before = all_gather(x.sum(1, keepdim=True), "a", dim=1, dst=R)
    before = before * (torch.arange(axis_size("a")) < axis_index("a"))
    x = x.cumsum(1) + before.sum(1, keepdim=True)
    return all_reduce(functional.pad(x[:, 1:], (1, 0)).amax(1), "a", op="max", dst=I)


@pytest.mark.sample(1)
@pytest.mark.parametrize(("body", "spec"), [(beside_a_choice, P("a")), (of_zeros, P(None, "a"))])
def test_equal_entries_of_maxima_are_tried_beside_choices_and_where_all_are_zero(
    body: Callable[[Tensor], Tensor], spec: P
) -> None:
    mesh = make_mesh((2,), ("a",), kind="simulated")
    specs = (spec, P("a"), P(), P())
    mapped = shard_map(
        lambda x, *_: body(x), mesh=mesh, in_specs=specs, out_specs=P(), check="global"
    )
    others = numbers(8, 3).requires_grad_(), torch.zeros(5, dtype=torch.int64), random.key(0)
    with pytest.raises(ShardTypeError, match=r"the maximum or minimum over|puts dim 1 together"):
        check_program(mapped, numbers(4, 6).requires_grad_(), *others)

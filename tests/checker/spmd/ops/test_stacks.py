"""`all_gather` with `tiled=False`, JAX's default, under global strictness against one device."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_gather, all_reduce, lax
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

Body = Callable[[Tensor], Tensor]

X: Final = numbers(4, 6)
ROWS: Final = P("a", "b")


def stacked(x: Tensor, dim: int = 0, axis: str = "a") -> Tensor:
    found: Tensor = all_gather(x, axis, dim=dim, tiled=False, dst=I)
    return found


def columns(x: Tensor) -> Tensor:
    """Sums over the other axis, so that results are equal on all ranks."""
    return all_reduce(x.sum(-1), "b", dst=I)


def flattened(x: Tensor) -> Tensor:
    return columns(stacked(x.sin()).flatten(0, 1).cumsum(0))


def reshaped(x: Tensor) -> Tensor:
    rows = stacked(x.unsqueeze(1)).detach().clone().reshape(-1, 1, x.shape[1])
    return columns(rows.square()).flatten() * columns(stacked(x).reshape(-1, x.shape[1]))


def added(x: Tensor) -> Tensor:
    return columns(stacked(x.square().sum(0)).sum(0).unsqueeze(0).sin())


def averaged(x: Tensor) -> Tensor:
    return columns(stacked(x.square().mean(0)).mean(0, keepdim=True).sin())


def of_both_axes(x: Tensor) -> Tensor:
    return stacked(stacked(x.sum()).sum(), 0, "b").sum().sin()


def differentiated(x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        rows = stacked(x).reshape(-1, x.shape[1]).cumsum(0)
        return columns(rows.square()).sum() * stacked(columns(x).sin().sum()).sum()

    found: Tensor = torch.func.grad(loss)(x)
    return found


RIGHT: Final[list[tuple[Body, P]]] = [
    *((body, P()) for body in (flattened, reshaped, added, averaged, of_both_axes)),
    (differentiated, ROWS),
]


@pytest.mark.sample(3)
@pytest.mark.parametrize(("body", "out"), RIGHT)
def test_stacked_blocks_and_addends_equal_one_device(body: Body, out: P) -> None:
    assert_is_one_device(body, (X,), ROWS, out)


def test_all_gather_of_lax_is_that_of_one_device_with_the_default_of_jax() -> None:
    def norm(x: Tensor) -> Tensor:
        total = all_reduce(x.square().sum(), "b", dst=R)
        return x / lax.all_gather(total, "a").sum().sqrt()

    assert_is_one_device(norm, (X,), ROWS, ROWS)


def one_rank_s(x: Tensor) -> Tensor:
    return columns(stacked(x.sum(0))[0].unsqueeze(0))


def squared(x: Tensor) -> Tensor:
    return columns(stacked(x.sum(0)).square().sum(0).unsqueeze(0))


def sums_averaged(x: Tensor) -> Tensor:
    return columns(stacked(x.sum(0)).mean(0, keepdim=True))


def averages_added(x: Tensor) -> Tensor:
    return columns(stacked(x.mean(0)).sum(0, keepdim=True))


def blocks_added(x: Tensor) -> Tensor:
    return columns(stacked(x).sum(0))


def in_another_order(x: Tensor) -> Tensor:
    return columns(stacked(x, 1).reshape(-1, x.shape[1]).cumsum(0))


def of_equal_values(x: Tensor) -> Tensor:
    total = all_reduce(x.sum(), ("a", "b"), dst=I)
    return stacked(x.new_zeros(()) + total.detach()).sum()


WRONG: Final[list[Body]] = [
    *(one_rank_s, squared, blocks_added, in_another_order, sums_averaged, averages_added),
    of_equal_values,
]


@pytest.mark.parametrize("body", WRONG)
def test_what_treats_stacked_values_otherwise_is_refused(body: Body) -> None:
    assert_is_refused(body, (X,), ROWS, P())

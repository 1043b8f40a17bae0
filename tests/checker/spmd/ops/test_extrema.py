"""Extrema of parts, of booleans too, under global strictness against one device."""

from collections.abc import Callable
from typing import Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_reduce
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

Body = Callable[[Tensor], Tensor]

X: Final = numbers(4, 8)
ROWS: Final = P("a", "b")


def over(x: Tensor, op: str) -> Tensor:
    found: Tensor = all_reduce(x, "b", op=op, dst=I)  # type: ignore[arg-type]
    return found


def some(x: Tensor) -> Tensor:
    return over((x > 1).any(1), "max")


def overflows(x: Tensor) -> Tensor:
    flag = torch.isinf(x).any() | (x.abs() > 1.5).any()
    return all_reduce(flag.to(x.dtype), ("a", "b"), op="max", dst=I)


def none_but(x: Tensor) -> Tensor:
    """Not all of a row, and some of it, by the other extremum."""
    fails = torch.logical_not((x > -1).all(1, keepdim=True))
    return over((fails | (x > 1).any(1, keepdim=True)).int(), "max")


def every(x: Tensor) -> Tensor:
    return over(((x > -2).all(1) & ~(x > 2).any(1)).double(), "min")


def beyond(x: Tensor) -> Tensor:
    """Tells whether any integer is beyond a limit, on either side."""
    n = (4 * x.detach()).long()
    return over(((n.amax(1) >= 4) | (n.amax(1) > 2) | ~(n.amin(1) >= -4)).int(), "max")


def within(x: Tensor) -> Tensor:
    n = (4 * x.detach()).long()
    return over(((n.amax(1) < 5) & (n.amax(1) <= 5) & (n.amin(1) > -9)).int(), "min")


def stable(x: Tensor) -> Tensor:
    top = all_reduce(x.max(1, keepdim=True).values, "b", op="max", dst=R)
    low = all_reduce(x.detach().min(1, keepdim=True)[0], "b", op="min", dst=R)
    e = (x - top).exp()
    return e / all_reduce(e.sum(1, keepdim=True), "b", dst=R) * low


@pytest.mark.parametrize(
    ("body", "out"),
    [
        (some, P("a")),
        (overflows, P()),
        (none_but, P("a")),
        (every, P("a")),
        (beyond, P("a")),
        (within, P("a")),
        (stable, ROWS),
    ],
)
def test_the_extremum_of_parts_is_that_of_one_device(body: Body, out: P) -> None:
    assert_is_one_device(body, (X,), ROWS, out)


def other_kind(x: Tensor) -> Tensor:
    return over((x > 1).any(1).int(), "min")


def of_both_kinds(x: Tensor) -> Tensor:
    return over(((x > 1).any(1) | (x > -1).all(1)).int(), "max")


def beside_entries(x: Tensor) -> Tensor:
    return over(((x > 1).any(1, keepdim=True) | (x > 0)).all(1).int(), "min")


def counted(x: Tensor) -> Tensor:
    return all_reduce((x > 1).any(1).int(), "b", dst=I)


def negated_number(x: Tensor) -> Tensor:
    return over(1 - (x > 1).any(1).int(), "max")


def positions(x: Tensor) -> Tensor:
    return over(x.max(1).indices, "max")


def below(x: Tensor) -> Tensor:
    return over(((4 * x.detach()).long().amax(1) < 4).int(), "max")


@pytest.mark.parametrize(
    "body",
    [
        below,
        other_kind,
        of_both_kinds,
        beside_entries,
        counted,
        negated_number,
        positions,
    ],
)
def test_other_uses_of_a_part_s_extremum_are_refused(body: Body) -> None:
    assert_is_refused(body, (X,), ROWS, P("a"))

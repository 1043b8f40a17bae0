"""Blocks between dim 0 and another, as Megatron gathers and scatters: numbers decide them."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, all_gather, all_reduce, axis_size, reduce_scatter
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

Body = Callable[[Tensor, Tensor], Tensor]

ARGS: Final = (numbers(4, 8), numbers(8, 6))
COLUMNS: Final = (P("a", "b"), P())
INNER: Final = (P("a", "b"), P("b"))


def blocks(x: Tensor) -> list[Tensor]:
    return list(all_gather(x, "b", dim=0, dst=I).chunk(axis_size("b")))


def gathers(x: Tensor, w: Tensor) -> Tensor:
    return (torch.cat(blocks(x.sin()), 1) @ w).tanh()


def scatters(x: Tensor, w: Tensor) -> Tensor:
    stacked = torch.cat((x.sin() @ w).chunk(axis_size("b"), 1))
    return reduce_scatter(stacked, "b", dim=0).tanh()


def stacks_and_joins(x: Tensor, w: Tensor) -> Tensor:
    """The blocks of a sum stand behind one another while it is pending."""
    stacked = torch.cat((x @ w).chunk(axis_size("b"), 1))
    return all_reduce(torch.cat(stacked.chunk(axis_size("b")), -1), "b", dst=I)


RIGHT: Final = [
    (gathers, COLUMNS, P("a")),
    (scatters, INNER, P("a", "b")),
    (stacks_and_joins, INNER, P("a")),
]


@pytest.mark.parametrize(("body", "specs", "out"), RIGHT)
def test_blocks_that_are_joined_in_order_are_those_of_one_device(
    body: Body, specs: Any, out: P
) -> None:
    assert_is_one_device(body, ARGS, specs, out)


WRONG: Final[dict[str, Body]] = {
    "another order": lambda x, w: torch.cat(blocks(x)[::-1], 1),
    "one of them twice": lambda x, w: torch.cat([blocks(x)[0], *blocks(x)[:-1]], 1),
    "beside those of another": lambda x, w: torch.cat([blocks(x)[0], *blocks(x.sin())[1:]], 1),
    "one alone": lambda x, w: blocks(x)[0].sin(),
    "behind one another": lambda x, w: torch.cat(blocks(x), 0).sin(),
    "of other sizes": lambda x, w: torch.cat(
        all_gather(x, "b", dim=0, dst=I).chunk(2 * axis_size("b"))[:2], 1
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_blocks_that_are_used_otherwise_are_refused(name: str) -> None:
    assert_is_refused(WRONG[name], ARGS, COLUMNS, P("a"))


def test_a_scatter_of_another_dim_than_the_blocks_stand_in_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        stacked = torch.cat((x.sin() @ w[:, :4]).chunk(axis_size("b"), 1))
        return reduce_scatter(stacked, "b", dim=1)

    assert_is_refused(body, ARGS, INNER, P("a", "b"))

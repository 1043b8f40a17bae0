"""`embedding_bag` under check="global", with a gradient and without one, against one device."""

from collections.abc import Callable
from functools import partial
from typing import Any, Final, TypeAlias

import pytest
import torch
from torch import Tensor
from torch.nn.functional import embedding_bag

from shardmap_torch import I, P, ShardTypeError, all_reduce, check_program, explain, shard_map
from tests.checker.support.one_device import (
    RANKS,
    assert_is_one_device,
    assert_is_refused,
    numbers,
)
from tests.support.golden import told

Program: TypeAlias = tuple[Callable[..., Tensor], tuple[Tensor, ...], Any, P]

IDS: Final = (numbers(4, 6) * 100).long() % 8
FLAT, ENDS = IDS.flatten(), torch.arange(0, 24, 4)
TABLE, SCALES = numbers(8, 6), numbers(4, 6)


def bags(i: Tensor, w: Tensor, mode: str = "sum") -> Tensor:
    return embedding_bag(i, w, mode=mode)


def weighted(i: Tensor, w: Tensor, s: Tensor) -> Tensor:
    return embedding_bag(i, w, mode="sum", per_sample_weights=s)


def summed(i: Tensor, w: Tensor, mode: str = "sum", op: Any = "sum") -> Tensor:
    total: Tensor = all_reduce(embedding_bag(i, w, mode=mode), "a", dst=I, op=op)
    return total


def divided(i: Tensor, ends: Tensor, w: Tensor, mode: str = "sum") -> Tensor:
    return embedding_bag(i, w, ends, mode=mode)


ROWS, COLUMNS = (P("a"), P()), (P(), P(None, "a"))
RIGHT: Final[dict[str, Program]] = {
    "sums": (bags, (IDS, TABLE), ROWS, P("a")),
    "means": (partial(bags, mode="mean"), (IDS, TABLE), ROWS, P("a")),
    "largest": (partial(bags, mode="max"), (IDS, TABLE), ROWS, P("a")),
    "weighted sums": (weighted, (IDS, TABLE, SCALES), (*ROWS, P("a")), P("a")),
    "columns of the table": (bags, (IDS, TABLE), COLUMNS, P(None, "a")),
    "rows and columns": (bags, (IDS, TABLE), (P("b"), P(None, "a")), P("b", "a")),
    "parts of bags": (summed, (IDS, TABLE), (P(None, "a"), P()), P()),
    "means of parts of bags": (
        partial(summed, mode="mean", op="mean"),
        (IDS, TABLE),
        (P(None, "a"), P()),
        P(),
    ),
    "bags of several lengths": (
        divided,
        (FLAT, ENDS, TABLE),
        (P(), *COLUMNS),
        P(None, "a"),
    ),
    "the largest of bags of several lengths": (
        partial(divided, mode="max"),
        (FLAT, ENDS, TABLE),
        (P(), *COLUMNS),
        P(None, "a"),
    ),
}


@pytest.mark.parametrize("name", RIGHT)
def test_bags_are_those_of_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


@pytest.mark.parametrize("flows", [True, False])
@pytest.mark.parametrize("name", RIGHT)
def test_layouts_prove_bags_whether_a_gradient_flows_or_not(name: str, flows: bool) -> None:
    body, operands, specs, out = RIGHT[name]
    xs = [x.detach().requires_grad_(flows and x.is_floating_point()) for x in operands]
    mapped = shard_map(body, mesh=RANKS, in_specs=specs, out_specs=out, check="global")
    assert explain(mapped, *xs).one_device == "proven"


def test_bags_without_a_gradient_that_skip_an_index_are_tried() -> None:
    mapped = shard_map(
        partial(embedding_bag, mode="sum", padding_idx=2),
        mesh=RANKS,
        in_specs=ROWS,
        out_specs=P("a"),
        check="global",
    )
    torch.testing.assert_close(
        mapped(IDS, TABLE), embedding_bag(IDS, TABLE, mode="sum", padding_idx=2)
    )


WRONG: Final[dict[str, Program]] = {
    "means of parts, summed": (
        partial(summed, mode="mean"),
        (IDS, TABLE),
        (P(None, "a"), P()),
        P(),
    ),
    "the largest of parts, summed": (
        partial(summed, mode="max"),
        (IDS, TABLE),
        (P(None, "a"), P()),
        P(),
    ),
    "parts of bags, not summed": (bags, (IDS, TABLE), (P(None, "a"), P()), P()),
    "the rows of a rank's part of the table": (
        lambda i, w: summed(i % w.shape[0], w),
        (IDS, TABLE),
        (P(), P("a")),
        P(),
    ),
    "a rank's part of the indices of several bags": (
        divided,
        (FLAT, ENDS, TABLE),
        (P("a"), P(), P()),
        P(),
    ),
    "a rank's part of the rows, of several bags": (
        lambda i, ends, w: divided(i % 4, ends, w),
        (FLAT, ENDS, TABLE),
        (P(), P(), P("a")),
        P(),
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_bags_that_are_others_on_one_device_are_refused(name: str) -> None:
    assert_is_refused(*WRONG[name])


@pytest.mark.parametrize("name", WRONG)
def test_they_are_refused_without_a_gradient_too(name: str) -> None:
    body, operands, specs, out = WRONG[name]
    mapped = shard_map(body, mesh=RANKS, in_specs=specs, out_specs=out, check="global")
    with told(ShardTypeError):
        check_program(mapped, *operands)

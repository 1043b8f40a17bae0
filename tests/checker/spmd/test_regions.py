"""Regions beside axes that their types do not name: tried with numbers."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    local_region,
    ppermute,
    ragged_all_to_all,
    reduce_scatter,
)
from tests.checker.support.one_device import assert_is_one_device, assert_is_refused, numbers

Body = Callable[..., Tensor]

IDS: Final = torch.tensor([[0, 5, 2], [3, 1, 7], [4, 4, 0], [6, 2, 1]])
TABLE: Final = numbers(8, 4)
X: Final = numbers(4, 6, 8)
ROWS: Final = P(None, "b")


def region(in_types: Any, out_types: Any = ROWS) -> Callable[[Body], Body]:
    return lambda f: local_region(f, in_types=in_types, out_types=out_types)


@region((P(), P("b")), P(partial={"b"}))
def rows(ids: Tensor, table: Tensor) -> Tensor:
    own = ids - axis_index("b") * table.shape[0]
    inside = (own >= 0) & (own < table.shape[0])
    return table[own * inside] * inside.unsqueeze(-1)


def looked_up(ids: Tensor, table: Tensor) -> Tensor:
    return all_reduce(rows(ids, table), "b", dst=I)


@region((P(None, None, "b"),), P(None, None, "b"))
def softmax(x: Tensor) -> Tensor:
    x = x - all_reduce(x.detach().amax(-1, keepdim=True), "b", dst=R, op="max")
    return x.exp() / all_reduce(x.exp().sum(-1, keepdim=True), "b", dst=R)


@region((ROWS,))
def from_the_rank_before(x: Tensor) -> Tensor:
    """Rolls a sharded dim by one: what leaves a rank enters the next."""
    count = axis_size("b")
    last = ppermute(x[:, -1:], "b", [(i, (i + 1) % count) for i in range(count)])
    return torch.cat([last, x[:, :-1]], 1)


@region((ROWS,))
def gathered_and_taken(x: Tensor) -> Tensor:
    every = all_gather(x, "b", dim=1, dst=R)
    return every.narrow(1, axis_index("b") * x.shape[1], x.shape[1]) * every.sum(1, keepdim=True)


@region((P(None, "b"),), P(None, "b"))
def exchanged(x: Tensor) -> Tensor:
    y = all_to_all(x, "b", split_dim=2, concat_dim=1).cumsum(1)
    return all_to_all(y, "b", split_dim=1, concat_dim=2)


@region((ROWS,), P(None, "b"))
def scattered(x: Tensor) -> Tensor:
    total = reduce_scatter(all_gather(x, "b", dim=1, dst=R) * (axis_index("b") + 1.0), "b", dim=1)
    count = axis_size("b")
    return total * 2 / (count * (count + 1.0))


@region((P(None, None, "b"),), P(None, None, "b"))
def squared(x: Tensor) -> Tensor:
    return x * x


def merged_batch(x: Tensor) -> Tensor:
    y: Tensor = merged(x).unflatten(0, (x.shape[0], -1))
    return y


@region((P(),), P())
def merged(x: Tensor) -> Tensor:
    return x.flatten(0, 1).sin()


RIGHT: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "a lookup of a batch": (looked_up, (IDS, TABLE), (P("a"), P("b")), P("a")),
    "a softmax": (softmax, (X,), (P("a", None, "b"),), P("a", None, "b")),
    "a roll": (from_the_rank_before, (X,), (P("a", "b"),), P("a", "b")),
    "a gather": (gathered_and_taken, (X,), (P("a", "b"),), P("a", "b")),
    "an exchange": (exchanged, (X,), (P("a", "b"),), P("a", "b")),
    "a scatter": (scattered, (X,), (P("a", "b"),), P("a", "b")),
    "a dim that both shard": (
        squared,
        (X,),
        (P(None, None, ("b", "a")),),
        P(None, None, ("b", "a")),
    ),
    "dims that are merged": (merged_batch, (X,), (P("a"),), P("a")),
}


@pytest.mark.parametrize("name", RIGHT)
def test_a_region_serves_programs_with_another_axis(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


def test_a_region_leaves_a_sum_over_another_axis() -> None:
    @region((ROWS,), P("b"))
    def total(x: Tensor) -> Tensor:
        return x.sum(0) * (axis_index("b") * 0 + 1)

    def body(x: Tensor) -> Tensor:
        return all_reduce(total(x), "a", dst=I)

    assert_is_one_device(body, (X,), (P("a", "b"),), P("b"))


def centred(x: Tensor) -> Tensor:
    return x - x.mean(0)


def flipped(x: Tensor) -> Tensor:
    return x.flip(0)


def numbered(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0], dtype=x.dtype)[:, None, None]


def by_another_rank(x: Tensor) -> Tensor:
    return x * (axis_index("a") + 1.0)


def sum_squared(x: Tensor) -> Tensor:
    return x.sum(0, keepdim=True).square().expand_as(x)


def by_size(x: Tensor) -> Tensor:
    return x / x.shape[0]


def gathered_batch(x: Tensor) -> Tensor:
    return all_to_all(all_to_all(x, "b", split_dim=0, concat_dim=1), "b", split_dim=0, concat_dim=1)


def first_rows_of_each(x: Tensor) -> Tensor:
    """Sends each rank one row, and so counts rows that another axis shards."""
    sizes = torch.ones(axis_size("b"), dtype=torch.int64)
    return ragged_all_to_all(x, "b", send_sizes=sizes, length=x.shape[0])[0]


WRONG: Final[list[Body]] = [
    centred,
    flipped,
    numbered,
    by_another_rank,
    sum_squared,
    by_size,
    gathered_batch,
    first_rows_of_each,
]


@pytest.mark.parametrize("body", WRONG)
def test_a_region_that_mixes_what_another_axis_shards_is_refused(body: Body) -> None:
    text = "dim 0 is sharded over 'a'.*\n.*\n.*\nFix: say P\\('a', 'b', None\\), as it is sharded"
    assert_is_refused(region((ROWS,))(body), (X,), (P("a", "b"),), P("a", "b"), text)

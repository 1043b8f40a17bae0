"""Collectives over an axis whose ranks both programs have, beside one that is compared."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    axis_size,
    check_program,
    make_mesh,
    ppermute,
    ragged_all_to_all,
    reduce_scatter,
    shard_map,
)
from tests.checker.support.one_device import numbers
from tests.programs.support.harness import global_value
from tests.support.golden import told

Body = Callable[..., Tensor]

IDS: Final = torch.tensor([[0, 5, 2], [3, 1, 7], [4, 4, 0], [6, 2, 1]])
TABLE: Final = numbers(8, 4)
X: Final = numbers(4, 6, 8)


def mapped(body: Body, ranks: int, in_specs: Any, out_specs: P) -> Body:
    """Maps a body over 2 ranks of b, and some of a, over which it is compared."""
    mesh = make_mesh((ranks, 2), ("a", "b"), kind="simulated", simulate="ranks")
    check: Any = {"a": "global", "b": "local"}
    return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check)


def looked_up(ids: Tensor, table: Tensor) -> Tensor:
    own = ids - axis_index("b") * table.shape[0]
    inside = (own >= 0) & (own < table.shape[0])
    return all_reduce(table[own * inside] * inside.unsqueeze(-1), "b", dst=I)


def softmax(x: Tensor) -> Tensor:
    x = x - all_reduce(x.detach().amax(-1, keepdim=True), "b", dst=R, op="max")
    return x.exp() / all_reduce(x.exp().sum(-1, keepdim=True), "b", dst=R)


def from_the_rank_before(x: Tensor) -> Tensor:
    """Rolls a sharded dim by one: what leaves a rank enters the next."""
    last = ppermute(x[:, -1:], "b", [(0, 1), (1, 0)])
    return torch.cat([last, x[:, :-1]], 1)


def gathered_and_taken(x: Tensor) -> Tensor:
    every = all_gather(x, "b", dim=1, dst=R)
    return every.narrow(1, axis_index("b") * x.shape[1], x.shape[1]) * every.sum(1, keepdim=True)


def exchanged(x: Tensor) -> Tensor:
    y = all_to_all(x, "b", split_dim=2, concat_dim=1).cumsum(1)
    return all_to_all(y, "b", split_dim=1, concat_dim=2)


def scattered(x: Tensor) -> Tensor:
    return reduce_scatter(all_gather(x, "b", dim=1, dst=R) * (axis_index("b") + 1.0), "b", dim=1)


def total(x: Tensor) -> Tensor:
    return all_reduce(x.sum(0) * (axis_index("b") + 1), "a", dst=I)


ROWS: Final = P("a", "b")
RIGHT: Final[list[tuple[Body, tuple[Tensor, ...], Any, P]]] = [
    (looked_up, (IDS, TABLE), (P("a"), P("b")), P("a")),
    (softmax, (X,), (P("a", None, "b"),), P("a", None, "b")),
    (from_the_rank_before, (X,), (ROWS,), ROWS),
    (from_the_rank_before, (X,), (P(None, "b", "a"),), P(None, "b", "a")),
    (gathered_and_taken, (X,), (ROWS,), ROWS),
    (exchanged, (X,), (ROWS,), ROWS),
    (scattered, (X,), (ROWS,), ROWS),
    (total, (X,), (ROWS,), P("b")),
]


@pytest.mark.parametrize(("body", "args", "specs", "out"), RIGHT)
def test_what_treats_all_of_another_axis_alike_is_that_of_one_rank(
    body: Body, args: Any, specs: Any, out: P
) -> None:
    found, alone = (global_value(mapped(body, ranks, specs, out)(*args)) for ranks in (2, 1))
    torch.testing.assert_close(found, alone)


WRONG: Final[list[Body]] = [
    lambda x: x - x.mean(0),
    lambda x: x.flip(0),
    lambda x: x + torch.arange(x.shape[0])[:, None, None],
    lambda x: x * (axis_index("a") + 1.0),
    lambda x: x.sum(0, keepdim=True).square().expand_as(x),
    lambda x: x / x.shape[0],
    lambda x: all_to_all(x, "b", split_dim=0, concat_dim=1).reshape_as(x),
    lambda x: ragged_all_to_all(
        x, "b", send_sizes=torch.ones(axis_size("b"), dtype=torch.int64), length=2
    )[0],
]


@pytest.mark.parametrize("body", WRONG)
def test_what_mixes_what_another_axis_shards_is_refused(body: Body) -> None:
    with told(ShardTypeError):
        check_program(mapped(body, 2, (ROWS,), ROWS), X)

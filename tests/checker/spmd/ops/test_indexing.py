"""Reads and writes at positions on shards, against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, R, all_gather, all_reduce, explain, shard_map
from tests.checker.support.one_device import RANKS, assert_is_one_device, assert_is_refused, numbers

Body = Callable[..., Tensor]

X: Final = numbers(4, 6, 8)
IDS: Final = torch.tensor([1, 4])
TARGETS: Final = torch.tensor([5, 0, 3, 3])
POSITIVE: Final = numbers(4, 6, 8) > 0


def assign(x: Tensor, ids: Tensor, values: Any) -> Tensor:
    x = x.clone()
    x[:, ids] = values
    return x


def increment(x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[:, ids] += values
    return x


def targets(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]), at]


def targets_of_two(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0])[:, None], torch.stack([at, at - 1], 1)].sin()


def counted_columns(x: Tensor, at: Tensor) -> Tensor:
    """Picks a row for each column."""
    return x[at, torch.arange(x.shape[1])].cos()


def padded(x: Tensor, mask: Tensor) -> Tensor:
    """Masks rows as transformers do, by an index for each dim."""
    row, column = torch.arange(x.shape[0]), torch.arange(x.shape[1])
    return torch.where(mask[row[:, None], column[None]][..., None], x, 0.0)


def assign_targets(x: Tensor, at: Tensor, values: Tensor) -> Tensor:
    x = x * 1
    x[torch.arange(x.shape[0]), at] = values
    return x


def gated(x: Tensor) -> Tensor:
    first, gate, up = x.flatten(1).chunk(3, 1)
    return first + gate.sin() * up


def masked(x: Tensor, mask: Tensor) -> Tensor:
    x = x.clone()
    x[mask] = 0.5
    return x * x


def in_place(x: Tensor, ids: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x.index_add_(1, ids, values).index_fill_(1, ids[:1], 2.0)
    return x.index_copy_(1, ids.flip(0), values)


def added_up(x: Tensor, to: Tensor) -> Tensor:
    """Sums the rows that go to each of 8 places, and counts them; both in two ways."""
    h, ones = x.flatten(1), torch.ones(to.shape[0], dtype=x.dtype)
    sums = torch.zeros(8, h.shape[1], dtype=x.dtype).index_add(0, to, h, alpha=0.5)
    sums = sums + torch.zeros_like(sums).scatter_add_(0, to[:, None].expand_as(h), h)
    counts = torch.zeros(8, dtype=x.dtype).index_add_(0, to, ones)
    sums = sums + torch.zeros_like(sums).index_put((to,), h, accumulate=True)
    sums, counts = (all_reduce(y, "a", dst=I) for y in (sums, counts))
    return (sums / counts.clamp(min=1)[:, None]).sin()


def confusion(x: Tensor, to: Tensor) -> Tensor:
    """Adds up what belongs to pairs of places."""
    pairs = torch.zeros(8, 8, dtype=x.dtype)
    pairs.index_put_((to, 7 - to), x[:, 0, 0], accumulate=True)
    return all_reduce(pairs, "a", dst=I).sin()


def put_into(start: Tensor, x: Tensor, to: Tensor, sums: bool = True) -> Tensor:
    return all_reduce(start.index_put((to,), x[:, 0], accumulate=sums), "a", dst=I)


def added_to(start: Tensor, x: Tensor, to: Tensor) -> Tensor:
    return all_reduce(start.index_add(0, to, x[:, 0]), "a", dst=I)


def largest(x: Tensor, to: Tensor, by: str = "amax") -> Tensor:
    index = to[:, None].expand(x.shape[0], len(to), x.shape[2])
    return x.tanh().scatter_reduce(1, index, x[:, : len(to)], by).sin()


def recurrent(x: Tensor, w: Tensor) -> Tensor:
    """A state that starts from zeros, of which each rank makes those of its features."""
    h = torch.zeros(x.shape[0], w.shape[1], dtype=x.dtype)
    for step in x.unbind(1):
        before = all_gather(h, "b", dim=1, dst=R)
        h = (step @ w + torch.einsum("bh,hk->bk", before, w)).tanh()
    return h


def rows(x: Tensor) -> Tensor:
    first, *others = x
    y: Tensor = first + sum(others) * others[0]
    return y


def of_a_batch_of_one(x: Tensor, values: Tensor) -> Tensor:
    x = x.clone()
    x[:, 1:3] = values
    x[0] = 0.25
    return x


RIGHT: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "assigned": (assign, (X, IDS, numbers(4, 2, 8)), (P("a"), P(), P("a")), P("a")),
    "assigned by columns": (
        assign,
        (X, IDS, numbers(2, 8)),
        (P("a", None, "b"), P(), P(None, "b")),
        P("a", None, "b"),
    ),
    "assigned where a rank has one row": (
        assign,
        (X[:2], IDS, numbers(2, 2, 8)),
        (P("a"), P(), P("a")),
        P("a"),
    ),
    "a number": (
        lambda x, ids: assign(x, ids, 2.0),
        (X, IDS),
        (P("a", None, "b"), P()),
        P("a", None, "b"),
    ),
    "incremented": (increment, (X, IDS, numbers(4, 2, 8)), (P("a"), P(), P("a")), P("a")),
    "targets": (targets, (X, TARGETS), (P("a", None, "b"), P("a")), P("a", "b")),
    "two targets": (targets_of_two, (X, TARGETS), (P("a"), P("a")), P("a")),
    "targets where a rank has one row": (targets, (X[:2], TARGETS[:2]), (P("a"), P("a")), P("a")),
    "rows masked by an index, of which a rank has one": (
        padded,
        (X[:2], POSITIVE[:2, :, 0]),
        (P("a"), P("a")),
        P("a"),
    ),
    "repeated": (
        lambda x: (x.repeat(3, 1, 2).view(3, *x.shape[:2], 2, -1) * x[:, :, None]).sin().sum(0),
        (X,),
        (P("a", None, "b"),),
        P("a", None, None, "b"),
    ),
    "a row for each column": (
        counted_columns,
        (X[:, :4], TARGETS % 4),
        (P(None, "a"), P("a")),
        P("a"),
    ),
    "assigned targets": (
        assign_targets,
        (X, TARGETS, numbers(4, 8)),
        (P("a", None, "b"), P("a"), P("a", "b")),
        P("a", None, "b"),
    ),
    "masked": (masked, (X, POSITIVE), (P("a", "b"), P("a", "b")), P("a", "b")),
    "rows masked": (masked, (X, POSITIVE[:, 0, 0]), (P("a", "b"), P("a")), P("a", "b")),
    "in place": (in_place, (X, IDS, numbers(4, 2, 8)), (P("a"), P(), P("a")), P("a")),
    "added up": (added_up, (X, TARGETS), (P("a", "b"), P("a")), P(None, "b")),
    "largest of each place": (largest, (X, IDS), (P("a", None, "b"), P()), P("a", None, "b")),
    "pairs added up": (confusion, (X, TARGETS), (P("a"), P("a")), P()),
    "a recurrence": (
        recurrent,
        (X, numbers(8, 8)),
        (P("a", replicate={"b"}), P(None, "b", replicate={"a"})),
        P("a", "b"),
    ),
    "rows": (rows, (X,), (P(None, "a"),), P("a")),
    "of a batch of one": (
        of_a_batch_of_one,
        (X[:2], numbers(2, 2, 8)),
        (P(None, None, "a"), P(None, None, "a")),
        P(None, None, "a"),
    ),
    "diagonals": (lambda x: x.diagonal(0, 1, 2).cos(), (X,), (P("a"),), P("a")),
    "windows": (lambda x: x.unfold(1, 3, 2).sin(), (X,), (P("a", None, "b"),), P("a", None, "b")),
    "patches": (lambda x: functional.unfold(x[:, None], 2).cos(), (X,), (P("a"),), P("a")),
    "parts, each of which is sharded": (
        gated,
        (numbers(4, 3, 8),),
        (P(None, None, "a"),),
        P(None, "a"),
    ),
    "chunks": (lambda x: sum(x.chunk(3, 1), x[:, :2]), (X,), (P("a"),), P("a")),
    "searched": (
        lambda x: torch.searchsorted(torch.linspace(-1.0, 1.0, 5, dtype=x.dtype), x),
        (X.detach(),),
        (P("a"),),
        P("a"),
    ),
}


@pytest.mark.sample(10, "assigned targets")
@pytest.mark.parametrize("name", RIGHT)
def test_positions_in_shards_are_those_of_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name])


PROVEN: Final = ["windows", "patches", *(name for name in RIGHT if "has one" in name)]


@pytest.mark.parametrize("name", PROVEN)
def test_layouts_prove_windows_and_what_a_rank_has_one_row_of(name: str) -> None:
    body, args, in_specs, out_specs = RIGHT[name]
    mapped = shard_map(body, mesh=RANKS, in_specs=in_specs, out_specs=out_specs, check="global")
    assert "tried with numbers" not in str(explain(mapped, *args))


def counted(x: Tensor, table: Tensor) -> Tensor:
    """Takes the first rows for those of this rank's positions."""
    return x + table[torch.arange(x.shape[0])][:, None]


def counted_added(x: Tensor) -> Tensor:
    return x + torch.arange(x.shape[0])[:, None, None]


def counted_backwards(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(x.shape[0]).flip(0), at]


def counted_from_one(x: Tensor, at: Tensor) -> Tensor:
    return x[torch.arange(1, x.shape[0] + 1) - 2, at]


def rows_in_reverse(x: Tensor) -> Tensor:
    return torch.stack(x.unbind(0)[::-1])


WRONG: Final[dict[str, tuple[Body, tuple[Tensor, ...], Any, P]]] = {
    "as many entries of a whole tensor as a rank has of another": (
        lambda x, scale: x * scale[: x.shape[0]][:, None, None],
        (X, numbers(4)),
        (P("a"), P()),
        P("a"),
    ),
    "a row added by its position, of which a rank has one": (
        counted_added,
        (X[:2],),
        (P("a"),),
        P("a"),
    ),
    "repeated as often as a rank has rows": (
        lambda x: x.repeat(x.shape[0], 1, 1),
        (X,),
        (P("a"),),
        P("a"),
    ),
    "a row of a sharded stack": (lambda x: x[0] * x, (X,), (P("a"),), P("a")),
    "iteration over a sharded stack": (rows_in_reverse, (X,), (P("a"),), P("a")),
    "parts of blocks that are sharded": (
        lambda x: torch.mul(*x.flatten(1).chunk(2, 1)),
        (numbers(4, 3, 8),),
        (P(None, None, "a"),),
        P(None, "a"),
    ),
    "chunks of shards": (lambda x: torch.cat(x.chunk(2)[::-1]), (X,), (P("a"),), P("a")),
    "assigned to a sharded dim": (
        assign,
        (X, IDS, numbers(4, 2, 8)),
        (P(None, "a"), P(), P()),
        P(None, "a"),
    ),
    "values of all ranks": (
        lambda x, ids, v: assign(x, ids, v[:, :1]),
        (X, torch.tensor([1]), numbers(4, 2, 4)),
        (P(None, None, "a"), P(), P()),
        P(None, None, "a"),
    ),
    "positions that ranks share out": (
        assign,
        (X, IDS, numbers(4, 2, 8)),
        (P("b"), P("a"), P("b", "a")),
        P("b"),
    ),
    "a mask that is not sharded": (
        lambda x, mask: masked(x, mask[: x.shape[0]]),
        (X, POSITIVE),
        (P("a"), P()),
        P("a"),
    ),
    "positions counted in a table": (counted, (X[..., 0], numbers(4)), (P("a"), P()), P("a")),
    "positions added": (counted_added, (X,), (P("a"),), P("a")),
    "positions counted backwards": (counted_backwards, (X, TARGETS), (P("a"), P("a")), P("a")),
    "positions from one on": (counted_from_one, (X, TARGETS), (P("a"), P("a")), P("a")),
    "in place at sharded positions": (
        lambda x, ids, v: x.clone().index_copy_(1, ids, v),
        (X, IDS, numbers(4, 2, 8)),
        (P(None, "a"), P(), P()),
        P(None, "a"),
    ),
    "added to what every rank has": (
        added_to,
        (numbers(6, 8), X, TARGETS),
        (P(), P("a"), P("a")),
        P(),
    ),
    "the mean of places in a sharded dim": (
        lambda x: x.scatter_reduce(0, (x > 0).long(), x.cos(), "mean"),
        (X,),
        (P("a"),),
        P("a"),
    ),
    "put into what every rank has": (
        put_into,
        (numbers(6, 8), X, TARGETS),
        (P(), P("a"), P("a")),
        P(),
    ),
    "put, and not added up": (
        lambda x, to: put_into(x.new_zeros(6, 8), x, to, False),
        (X, TARGETS),
        (P("a"), P("a")),
        P(),
    ),
    "put as features that are sharded too": (
        lambda x, to: put_into(x.new_zeros(6, x.shape[0]), x.new_ones(x.shape[0], 1, 1), to),
        (X, TARGETS),
        (P("a"), P("a")),
        P(),
    ),
    "windows over a sharded dim": (
        lambda x: x.unfold(1, 2, 1),
        (X,),
        (P(None, "a"),),
        P(None, "a"),
    ),
    "searched in a shard": (
        lambda s, x: torch.searchsorted(s, x),
        (numbers(8).sort().values, X),
        (P("a"), P()),
        P(),
    ),
}


@pytest.mark.sample(12)
@pytest.mark.parametrize("name", WRONG)
def test_positions_that_mean_others_on_one_device_are_refused(name: str) -> None:
    assert_is_refused(*WRONG[name])


@pytest.mark.parametrize(
    "look_up", [lambda x, ids: functional.embedding(ids, x), lambda x, ids: x[ids]]
)
def test_a_lookup_in_a_sharded_table_names_the_layer_that_does_it(look_up: Body) -> None:
    table = numbers(8, 3)
    assert_is_refused(look_up, (table, IDS), (P("a"), P()), P())

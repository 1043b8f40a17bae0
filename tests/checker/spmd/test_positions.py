"""Positions counted from a rank's index, under global strictness, against one device."""

from collections.abc import Callable, Sequence
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
    axis_index,
    axis_size,
    check_program,
    make_mesh,
    shard_map,
)
from tests.checker.support.one_device import AXES, assert_is_one_device, numbers

Body = Callable[..., Tensor]

AUTO: Final = make_mesh((2, 2), AXES, kind="simulated")
ABSTRACT: Final = make_mesh((2, 2), AXES, kind="abstract")

X: Final = numbers(4, 8)
ROWS: Final = P(None, "a")
IDS: Final = torch.tensor([[3, 0, 5, 7], [1, 1, 6, 2]])


def own(x: Tensor, axis: Any = "a", dim: int = 1) -> Tensor:
    """The positions of a rank's entries along a dim."""
    n = x.shape[dim]
    return torch.arange(n) + axis_index(axis) * n


def causal(q: Tensor, k: Tensor) -> Tensor:
    """Attends to all keys, with queries [n, t/r] of a rank and their global positions."""
    keys = all_gather(k, "a", dim=1, dst=R)
    mask = own(q)[:, None] >= torch.arange(q.shape[1] * axis_size("a"))[None]
    scores = torch.einsum("bt,bs->bts", q, keys).masked_fill(~mask, -1e9)
    return torch.einsum("bts,bs->bt", scores.softmax(-1), keys)


def causal_of_slices(q: Tensor, k: Tensor) -> Tensor:
    keys, n = all_gather(k, "a", dim=1, dst=R), q.shape[1]
    mask = torch.ones(n * axis_size("a"), n * axis_size("a"), dtype=torch.bool).tril()
    rows = torch.narrow(mask, 0, axis_index("a") * n, n)
    scores = torch.einsum("bt,bs->bts", q, keys).masked_fill(~rows, -1e9)
    return torch.einsum("bts,bs->bt", scores.softmax(-1), keys)


def spaced(x: Tensor, last: int) -> Tensor:
    """Twice the positions of a rank's entries, up to that one from its first."""
    first = axis_index("a") * x.shape[1]
    return torch.linspace(2 * first, 2 * (first + last), x.shape[1])


def rotary(x: Tensor) -> Tensor:
    positions = own(x).to(x.dtype)
    angles = positions[:, None] * 100 ** -torch.linspace(0, 1, 3, dtype=x.dtype)
    return x * angles.cos().sum(1) + x.roll(1, 0) * angles.sin().sum(1)


def one_hot(x: Tensor, ids: Tensor) -> Tensor:
    """Multiplies the entries of a vocabulary that ids name, sharded over "a"."""
    hot = (ids[:, :, None] == own(x)).to(x.dtype)
    return all_reduce(torch.einsum("bsv,nv->nbs", hot, x.sin()), "a", dst=I)


def drawn(x: Tensor) -> Tensor:
    """Numbers from counters: the position of each entry among all."""
    count = torch.arange(x.numel()).view(x.shape) + axis_index("b") * x.numel()
    hashed = (count * 2654435761) % 4294967296
    return x * ((hashed % 1000) < 500)


def counted_by_ones(x: Tensor) -> Tensor:
    n = x.shape[1]
    own_ones = torch.ones(n, dtype=torch.int64)
    return x * (own_ones.cumsum(0) - 1 + axis_index("a") * n) * (2 * own_ones - 1)


def row_of_a_table(x: Tensor) -> Tensor:
    n, count = x.shape[1], axis_size("a")
    return x * torch.arange(n * count).view(count, n)[axis_index("a")]


RIGHT: Final[dict[str, tuple[Body, Sequence[Tensor], Any, P]]] = {
    "causal mask": (causal, (X, numbers(4, 8) + 1), (ROWS, ROWS), ROWS),
    "rows of a mask": (causal_of_slices, (X, numbers(4, 8) + 1), (ROWS, ROWS), ROWS),
    "rotary": (rotary, (X,), (ROWS,), ROWS),
    "one-hot": (one_hot, (X, IDS), (ROWS, P()), P()),
    "counters": (drawn, (X,), (P("b"),), P("b")),
    "two dims": (
        lambda x: x * (own(x, "a")[None] - 3 * own(x, "b", 0)[:, None]),
        (X,),
        (P("b", "a"),),
        P("b", "a"),
    ),
    "written over": (lambda x: x * own(x).add_(1), (X,), (ROWS,), ROWS),
    "counted by ones": (counted_by_ones, (X,), (ROWS,), ROWS),
    "spaced": (lambda x: x * spaced(x, x.shape[1] - 1), (X,), (ROWS,), ROWS),
    "a row of a table": (row_of_a_table, (X,), (ROWS,), ROWS),
}


@pytest.mark.sample(9)
@pytest.mark.parametrize("name", RIGHT)
def test_positions_of_a_rank_are_those_on_one_device(name: str) -> None:
    assert_is_one_device(*RIGHT[name], AUTO)


# Other offsets, axes and orders are drawn by the random programs below.
WRONG: Final[dict[str, tuple[Body, P]]] = {
    "ones without an offset": (
        lambda x: x * (torch.ones(x.shape[1], dtype=torch.int64).cumsum(0) - 1),
        ROWS,
    ),
    "a column of a table": (
        lambda x: x * torch.arange(8).view(x.shape[1], axis_size("a"))[:, axis_index("a")],
        ROWS,
    ),
    "the last row of a table": (
        lambda x: x * torch.arange(8).view(axis_size("a"), x.shape[1])[-1],
        ROWS,
    ),
    "spaced up to the next": (lambda x: x * spaced(x, x.shape[1]), ROWS),
    "cropped": (lambda x: x * own(x)[1:].sum(), ROWS),
}


@pytest.mark.parametrize("name", WRONG)
def test_positions_of_other_entries_are_refused(name: str) -> None:
    body, spec = WRONG[name]
    mapped = shard_map(body, mesh=ABSTRACT, in_specs=spec, out_specs=spec, check="global")
    with pytest.raises(ShardTypeError, match="check='global'"):
        check_program(mapped, X)

"""Indexing tables by integers that ranks share or not, against one device, on real ranks."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    Partial,
    R,
    V,
    all_reduce,
    axis_index,
    check_program,
    make_mesh,
    reinterpret,
    shard_map,
)
from tests.checker.support.rejections import ABSTRACT, X, assert_right, numbers, rejection

TABLE: Final = numbers(6, 4, seed=3)
IDS: Final = torch.tensor([0, 2, 1, 5, 3, 3, 0, 1])
WHOLE: Final = {"open": P(), "I": P(invariant={"tp"}), "R": P(replicate={"tp"})}


@pytest.mark.parametrize("spec", WHOLE)
@pytest.mark.parametrize("ids", ["K", "V"])
def test_a_whole_table_is_indexed(spec: str, ids: str) -> None:
    def body(table: Tensor, ids: Tensor) -> Tensor:
        return table[ids].sin() * table[ids[0]]

    def one(table: Tensor, ids_: Tensor) -> Tensor:
        first = ids_.reshape(4, 2)[:, :1].repeat(1, 2).reshape(8) if ids == "V" else ids_[0]
        return table[ids_].sin() * table[first]

    at = P("tp") if ids == "V" else P()
    args: dict[str, Any] = {"in_specs": (WHOLE[spec], at), "out_specs": at}
    if (spec, ids) == ("I", "V"):
        assert "over axis 'tp' of I and V" in rejection(body, TABLE, IDS, **args)
    else:
        assert_right(body, one, TABLE, IDS, **args)


@pytest.mark.parametrize("index", [lambda i: i, lambda i: i[2]])
def test_a_table_cut_by_columns_is_indexed_by_shared_integers(index: Any) -> None:
    specs: dict[str, Any] = {"in_specs": (P(None, "tp"), P()), "out_specs": P(None, "tp")}
    assert_right(
        lambda t, i: t[index(i)].reshape(-1, 1),
        lambda t, i: t[index(i)].reshape(-1, 4),
        TABLE,
        IDS,
        **specs,
    )


def vocabulary_parallel(table: Tensor, ids: Tensor, one: bool = False) -> Tensor:
    """Each rank looks up what it has, and the sum is what all have."""
    rows = table.shape[0]
    local = ids - axis_index("tp") * rows
    own = (local >= 0) & (local < rows)
    return all_reduce(table[local.clamp(0, rows - 1)] * own[:, None], "tp", dst=I)


def test_a_table_cut_by_rows_is_looked_up_in_parallel() -> None:
    table = numbers(8, 4, seed=4)
    specs: dict[str, Any] = {"in_specs": (P("tp"), P()), "out_specs": P()}
    assert_right(vocabulary_parallel, lambda t, i: t[i], table, IDS, **specs)


@pytest.mark.parametrize("index", [lambda i: i, lambda i: i[1]])
def test_a_table_that_is_a_sum_takes_shared_integers_only(index: Any) -> None:
    def body(table: Tensor, ids: Tensor) -> Tensor:
        partial = reinterpret(table, "tp", src=V, dst=Partial)
        return all_reduce(partial[index(ids)], "tp", dst=R)

    def one(table: Tensor, ids: Tensor) -> Tensor:
        return table.reshape(4, 6, 4).sum(0)[index(ids)]

    stacked = numbers(24, 4)
    assert_right(body, one, stacked, IDS, in_specs=(P("tp"), P()), out_specs=P())
    text = rejection(body, stacked, IDS, in_specs=(P("tp"), P("tp")), out_specs=P())
    assert "what selects, scales or places addends of a sum must be equal on all ranks" in text


PLACES: Final[dict[str, Callable[[Tensor, Any], Tensor]]] = {
    "first": lambda x, i: x[i],
    "second": lambda x, i: x[:, i],
    "last": lambda x, i: x[..., i],
    "before": lambda x, i: x[..., i, :],
    "new": lambda x, i: x[None, 1:, i, ::2],
    "two": lambda x, i: x[i, i],
    "beside integers": lambda x, i: x[0, i],
    "beside a list": lambda x, i: x[[0, 1, 1], i],
    "negative": lambda x, i: x[i - 2],
}


@pytest.mark.parametrize("name", PLACES)
def test_a_rank_picks_its_own_row(name: str) -> None:
    x = numbers(4, 4, 4)
    place = PLACES[name]
    assert_right(
        lambda x: place(x, axis_index("tp"))[None],
        lambda x: torch.stack([place(x, rank) for rank in range(4)]),
        x,
        in_specs=P(),
        out_specs=P("tp"),
    )


def _write_first(y: Tensor, i: Any, row: Any) -> None:
    y[i] = row


def _write_second(y: Tensor, i: Any, row: Any) -> None:
    y[:, i] = row


def _write_last(y: Tensor, i: Any, row: Any) -> None:
    y[None, ..., i] = row


@pytest.mark.parametrize("write", [_write_first, _write_second, _write_last])
@pytest.mark.parametrize("value", ["row", "number"])
def test_a_rank_writes_its_own_row(write: Callable[..., None], value: str) -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.zeros(4, 4, dtype=x.dtype)
        write(y, axis_index("tp"), x[0] if value == "row" else 2.0)
        return all_reduce(y * x.sum(), "tp", dst=I)

    def one(x: Tensor) -> Tensor:
        total = torch.zeros(4, 4, dtype=x.dtype)
        for rank in range(4):
            y = torch.zeros(4, 4, dtype=x.dtype)
            write(y, rank, x[rank] if value == "row" else 2.0)
            total = total + y * x[rank].sum()
        return total

    assert_right(body, one, numbers(4, 4), in_specs=P("tp"), out_specs=P())


def _added(y: Tensor, i: Any) -> None:
    y[i] += 1.0


def _added_to_itself(y: Tensor, i: Any) -> None:
    y[i] = y[i] + y[i - 1]


def _row_written(y: Tensor, i: Any) -> None:
    y[i].mul_(2.0)


def _row_of_a_row(y: Tensor, i: Any) -> None:
    y[i][i] += 3.0


def _column(y: Tensor, i: Any) -> None:
    y[:, i] += y[i]


def _written_before_and_after(y: Tensor, i: Any) -> None:
    y[i] *= 2.0
    y.add_(1.0)
    y[i] -= 4.0


def _entry(y: Tensor, i: Any) -> None:
    y[i, :, None, i] = y[i, i][:, None]


@pytest.mark.parametrize(
    "write",
    [
        _added,
        _added_to_itself,
        _row_written,
        _row_of_a_row,
        _column,
        _written_before_and_after,
        _entry,
    ],
)
def test_a_rank_writes_into_its_own_row(write: Callable[[Tensor, Any], None]) -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        write(y, axis_index("tp"))
        return y.sin()[None]

    def one(x: Tensor) -> Tensor:
        found = []
        for rank in range(4):
            y = x.clone()
            write(y, rank)
            found.append(y.sin())
        return torch.stack(found)

    assert_right(body, one, numbers(4, 4, 4), in_specs=P(), out_specs=P("tp"))


def _row_returned(y: Tensor) -> Tensor:
    row = y[axis_index("tp") * 0]
    y.mul_(2)
    return row


def _row_after_another_is_written(y: Tensor) -> Tensor:
    first, second = y[axis_index("tp")], y[axis_index("tp") * 0]
    first.add_(1)
    return second * 2


def _row_after_it_is_replaced(y: Tensor) -> Tensor:
    row = y[axis_index("tp")]
    y[axis_index("tp")] = row * 2
    return row.sin()


@pytest.mark.parametrize(
    "body", [_row_returned, _row_after_another_is_written, _row_after_it_is_replaced]
)
def test_a_row_is_not_read_after_its_tensor_is_written(body: Callable[[Tensor], Tensor]) -> None:
    text = rejection(lambda x: body(x.clone()), X.detach(), in_specs=P(), out_specs=P("tp"))
    assert "a tensor is read after a write into the tensor that it is a part of" in text
    assert text.splitlines()[-1] == "Fix: take it again after the write, or clone it before."


def test_a_row_of_an_input_is_not_written() -> None:
    def body(x: Tensor) -> Tensor:
        x[axis_index("tp")] += 1
        return x

    text = rejection(body, X.detach(), in_specs=P(), out_specs=P("tp"))
    assert "add_ writes into a tensor that is the input x" in text


def test_a_write_at_a_number_and_other_positions_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.zeros(4, 4)
        y[axis_index("tp"), torch.arange(2)] = 1.0
        return y

    text = rejection(body, X.detach(), in_specs=P(), out_specs=P("tp"))
    assert text.splitlines() == [
        "body: a write at a position that a number and other tensors give together is not known to "
        "the checker.",
        f"  at test_indexing.py:{body.__code__.co_firstlineno + 2}: "
        'y[axis_index("tp"), torch.arange(2)] = 1.0',
        "Fix: use index_put.",
    ]


def test_what_picks_a_row_by_a_tensor_runs_on_ranks() -> None:
    mesh = make_mesh((4,), ("tp",), kind="simulated")
    f = shard_map(lambda x: x[axis_index("tp")][None], mesh=mesh, in_specs=P(), out_specs=P("tp"))
    torch.testing.assert_close(f(X[:4]), X[:4])
    mapped = shard_map(lambda x, i: x[i], mesh=ABSTRACT, in_specs=P(), out_specs=P())
    assert not check_program(mapped, X, IDS[0]).batches
    assert check_program(mapped, X, IDS).batches

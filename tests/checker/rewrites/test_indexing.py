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
from tests.support.golden import hold_own

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


def _column(y: Tensor, i: Any) -> None:
    y[:, i] += y[i]


def _written_before_and_after(y: Tensor, i: Any) -> None:
    y[i] *= 2.0
    y.add_(1.0)
    y[i] -= 4.0


def _entry(y: Tensor, i: Any) -> None:
    y[i, :, None, i] = y[i, i][:, None]


@pytest.mark.parametrize(
    "write", [_added, _added_to_itself, _column, _written_before_and_after, _entry]
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


def _row_written(y: Tensor) -> Tensor:
    y[axis_index("tp")].mul_(2.0)
    return y


def _row_written_and_put_elsewhere(y: Tensor) -> Tensor:
    row = y[axis_index("tp")]
    row.mul_(2.0)
    y[axis_index("tp") * 0] = row
    return y


def _row_of_a_row(y: Tensor) -> Tensor:
    y[axis_index("tp")][axis_index("tp") * 0] += 3.0
    return y


def _row_put_back_after_another_write(y: Tensor) -> Tensor:
    index, other = axis_index("tp"), y.reshape(-1)
    row = y[index]
    other.add_(1)
    y[index] = row
    return y


@pytest.mark.parametrize(
    "body",
    [
        _row_returned,
        _row_after_another_is_written,
        _row_after_it_is_replaced,
        _row_written,
        _row_written_and_put_elsewhere,
        _row_of_a_row,
        _row_put_back_after_another_write,
    ],
)
def test_a_tensor_is_not_read_after_a_write_into_what_shares_its_memory(
    body: Callable[[Tensor], Tensor],
) -> None:
    hold_own(rejection(lambda x: body(x.clone()), X.detach(), in_specs=P(), out_specs=P("tp")))


def test_what_shares_memory_at_a_position_is_explained() -> None:
    def body(x: Tensor) -> Tensor:
        y = x.clone()
        y[axis_index("tp")].mul_(2.0)
        return y.sin()

    hold_own(rejection(body, X.detach(), in_specs=P(), out_specs=P("tp")))


@pytest.mark.parametrize("mask", ["of its rows", "of all"])
def test_what_a_mask_selects_is_refused_with_what_has_a_shape(mask: str) -> None:
    def body(x: Tensor, m: Tensor) -> Tensor:
        return all_reduce(x[m].sum(), "tp", dst=I)

    at = P("tp") if mask == "of its rows" else P()
    text = rejection(body, X.detach(), X > 0, in_specs=(at, at), out_specs=P())
    assert "Fix: keep the shape: of x[mask].sum() write torch.where(mask, x, 0).sum()" in text


def test_a_write_at_a_number_and_other_positions_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y = torch.zeros(4, 4)
        y[axis_index("tp"), torch.arange(2)] = 1.0
        return y

    hold_own(rejection(body, X.detach(), in_specs=P(), out_specs=P("tp")))


def test_what_picks_a_row_by_a_tensor_runs_on_ranks() -> None:
    mesh = make_mesh((4,), ("tp",), kind="simulated")
    f = shard_map(lambda x: x[axis_index("tp")][None], mesh=mesh, in_specs=P(), out_specs=P("tp"))
    torch.testing.assert_close(f(X[:4]), X[:4])
    mapped = shard_map(lambda x, i: x[i], mesh=ABSTRACT, in_specs=P(), out_specs=P())
    assert not check_program(mapped, X, IDS[0]).batches
    assert check_program(mapped, X, IDS).batches


# -------------------------------------------------------------------------------- ranges

AT: Final = torch.tensor(2)


@pytest.mark.parametrize(
    "part",
    [lambda x, at: torch.narrow(x, 0, at, 2), lambda x, at: x.narrow(start=at, dim=1, length=3)],
)
def test_a_rank_reads_from_its_own_start(part: Callable[[Tensor, Any], Tensor]) -> None:
    assert_right(
        lambda x: part(x, axis_index("tp"))[None].sin(),
        lambda x: torch.stack([part(x, rank) for rank in range(4)]).sin(),
        numbers(6, 6, 4),
        in_specs=P(),
        out_specs=P("tp"),
    )


def _assign(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[:, :, at : at + 1] = k[:, :, :1]
    return c


def _assign_several(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[..., at : at + k.shape[2], :] = k
    return c


def _assign_number(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[1, :, :at] = 2.0
    c[..., None, at:, :] = k[:, :, None, 1:]
    return c


def _assign_below(c: Tensor, k: Tensor, at: Any) -> Tensor:
    c = c.clone()
    c[0, :, :at] = k[0]  # as many as there are
    return c


WRITES: Final[dict[str, Callable[[Tensor, Tensor, Any], Tensor]]] = {
    "one entry": _assign,
    "several": _assign_several,
    "a number": _assign_number,
    "as many as the position": _assign_below,
}


@pytest.mark.parametrize("name", WRITES)
@pytest.mark.parametrize("check", [True, "global"])
def test_a_cache_whose_heads_are_sharded_is_written_at_a_position(name: str, check: Any) -> None:
    cache, keys = numbers(2, 4, 6, 3).requires_grad_(), numbers(2, 4, 2, 3).requires_grad_()
    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")
    heads = P(None, "tp")
    f = shard_map(
        WRITES[name], mesh=mesh, in_specs=(heads, heads, P()), out_specs=heads, check=check
    )
    expected = WRITES[name](cache, keys, 2)
    y = f(cache, keys, AT)
    torch.testing.assert_close(y, expected)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).reshape(y.shape)
    found = torch.autograd.grad((y * weights).sum(), [cache, keys])
    for x, wanted in zip(
        found, torch.autograd.grad((expected * weights).sum(), [cache, keys]), strict=True
    ):
        torch.testing.assert_close(x, wanted)


@pytest.mark.parametrize("name", WRITES)
def test_a_cache_whose_positions_are_sharded_is_not_written_at_one(name: str) -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(
        WRITES[name],
        mesh=mesh,
        in_specs=(P(None, None, "tp"), P(), P()),
        out_specs=P(None, None, "tp"),
        check="global",
    )
    with pytest.raises(Exception, match="not what it is on one device"):
        f(numbers(2, 4, 6, 3), numbers(2, 4, 2, 3), AT)


def test_a_slice_between_tensors_is_not_read() -> None:
    def body(x: Tensor) -> Tensor:
        start = axis_index("tp")
        return x[start : start + 2]

    hold_own(rejection(body, X.detach(), in_specs=P(), out_specs=P("tp")))


def test_a_write_between_tensors_beside_other_tensors_is_refused() -> None:
    def body(x: Tensor) -> Tensor:
        y, start = x.clone(), axis_index("tp")
        y[torch.arange(2), start : start + 1] = 0.0
        return y

    hold_own(rejection(body, X.detach(), in_specs=P(), out_specs=P("tp")))

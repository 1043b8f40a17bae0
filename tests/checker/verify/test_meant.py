"""Repairs that say what was meant in place of a wrong axis, dim, type or size: whole texts."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    ShardTypeError,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    check_program,
    convert,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from tests.checker.support import repair_trials
from tests.support.golden import hold

pytestmark = pytest.mark.usefixtures("repairs")

PARTS: Final = P("dp"), P(None, "tp"), P("tp")
DENSE: Final = (8, 4), (4, 8), (8, 4)
SEQUENCES: Final = ((2, 8, 4, 4),) * 3


def weighs_by_shards(x: Tensor, v: Tensor) -> Tensor:
    return all_reduce(x.softmax(1) @ v, "tp", dst=I)


def adds_in_turn(x: Tensor, v: Tensor) -> Tensor:
    return x * torch.cumsum(x.exp(), 1)


def hidden(x: Tensor, w: Tensor) -> Tensor:
    return (x @ w).tanh()


def adds_rows_over_dp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    z = all_reduce(hidden(x, w) @ v, "dp", dst=I)
    return all_reduce(torch.relu(z).sum(), "dp", dst=I)


def averages_over_tp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    z = all_reduce(hidden(x, w) @ v, "tp", dst=I)
    return all_reduce(z.square().mean(), "tp", op="mean", dst=I)


def takes_each_axis_for_the_other(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    z = all_reduce(hidden(x, w) @ v, "dp", dst=I)
    return all_reduce(z.square().mean(), "tp", op="mean", dst=I)


def gathers_columns_over_dp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return all_gather(hidden(x, w), "dp", dim=1, dst=R)


def scatters_over_dp(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return reduce_scatter(hidden(x, w) @ v, "dp", dim=1)


def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (part.transpose(1, 2) for part in (q, k, v))
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def gives_heads_back_as_it_took_them(*parts: Tensor) -> Tensor:
    q, k, v = (all_to_all(part, "tp", split_dim=2, concat_dim=1) for part in parts)
    return all_to_all(attention(q, k, v), "tp", split_dim=2, concat_dim=1)


def takes_heads_as_it_gives_them_back(*parts: Tensor) -> Tensor:
    q, k, v = (all_to_all(part, "tp", split_dim=1, concat_dim=2) for part in parts)
    return all_to_all(attention(q, k, v), "tp", split_dim=1, concat_dim=2)


def adds_an_invariant_to_what_ranks_use(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    return x + all_reduce(hidden(x, w) @ v, "tp", dst=I)


def does_so_twice(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
    x = x + all_reduce(hidden(x, w) @ v, "tp", dst=I)
    return x + all_reduce(hidden(x, w).sin() @ v, "tp", dst=I)


def repeats_heads_of_all_ranks(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(times, 1) for part in (k, v))
    return functional.scaled_dot_product_attention(q, k, v)


def does_so_by_products(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    times = q.shape[1] // k.shape[1]
    k, v = (part.repeat_interleave(times, 1) for part in (k, v))
    return (q @ k.mT).softmax(-1) @ v


Body = Callable[..., Tensor]
_GROUPED: Final = (P(None, "tp"), P(), P()), P(None, "tp"), ((2, 8, 4, 4), *((2, 2, 4, 4),) * 2)
_SEQUENCE: Final = P(None, "tp")
Case = tuple[Body, tuple[int, int], Sequence[P], Any, Any]
CASES: Final[dict[str, Case]] = {
    "a sum over one rank": (adds_rows_over_dp, (1, 2), PARTS, P(), DENSE),
    "a sum over rows": (adds_rows_over_dp, (2, 1), PARTS, P(), DENSE),
    "a mean over columns": (averages_over_tp, (1, 2), PARTS, P(), DENSE),
    "a mean of one rank": (averages_over_tp, (2, 1), PARTS, P(), DENSE),
    "axes exchanged": (takes_each_axis_for_the_other, (1, 2), PARTS, P(), DENSE),
    "axes of two ranks exchanged": (takes_each_axis_for_the_other, (2, 2), PARTS, P(), DENSE),
    "a gather of one rank": (gathers_columns_over_dp, (1, 2), PARTS, P("dp"), DENSE),
    "a gather over rows": (gathers_columns_over_dp, (2, 1), PARTS, P("dp"), DENSE),
    "a scatter over one rank": (scatters_over_dp, (1, 2), PARTS, P("dp", "tp"), DENSE),
    "heads given back": (
        gives_heads_back_as_it_took_them,
        (1, 2),
        (_SEQUENCE,) * 3,
        _SEQUENCE,
        SEQUENCES,
    ),
    "heads taken": (
        takes_heads_as_it_gives_them_back,
        (1, 2),
        (_SEQUENCE,) * 3,
        _SEQUENCE,
        SEQUENCES,
    ),
    "softmax of shards": (weighs_by_shards, (1, 2), PARTS[1:], P(), DENSE[1:]),
    "entries in turn": (adds_in_turn, (1, 2), PARTS[1:], P(None, "tp"), DENSE[1:]),
    "a residual": (adds_an_invariant_to_what_ranks_use, (1, 2), PARTS, P("dp"), DENSE),
    "heads repeated": (repeats_heads_of_all_ranks, (1, 2), *_GROUPED),
    "heads repeated by products": (does_so_by_products, (1, 2), *_GROUPED),
    "two residuals": (does_so_twice, (1, 2), PARTS, P("dp"), DENSE),
}


@pytest.mark.parametrize("name", CASES)
def test_what_was_meant_is_named_and_right(name: str) -> None:
    body, sizes, specs, out, shapes = CASES[name]
    mesh = make_mesh(sizes, ("dp", "tp"), kind="simulated")
    mapped = shard_map(body, mesh=mesh, in_specs=tuple(specs), out_specs=out, check="global")
    random = torch.Generator().manual_seed(0)
    args = [torch.randn(s, generator=random, dtype=torch.float64) for s in shapes]
    args = [x.requires_grad_() for x in args]
    (found,) = repair_trials.rejections_of(lambda: check_program(mapped, *args))
    hold("meant.txt", name, str(found.error))
    assert "\nTried, and accepted also by check='global': " in str(found.error)
    assert repair_trials.fate_of(found, repair_of(found.error)) == repair_trials.RIGHT


def repair_of(error: Any) -> Any:
    return error.rejection.tried


def scattered(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=1, dst=R) @ up)
    return x + reduce_scatter(h @ down, "tp", dim=dim)


def normed(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=1, dst=R) @ up)
    y = reduce_scatter(h @ down, "tp", dim=dim) * 2
    return x + functional.layer_norm(y, (4,))


def joined(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=1, dst=R) @ up)
    y = reduce_scatter(h @ down, "tp", dim=dim)
    return torch.cat([x, y], -1)


def taken(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=1, dst=R) @ up)
    y = all_reduce(h @ down, "tp", dst=R)
    return x + convert(y, "tp", src=R, dst=V, dim=dim)


def exchanged(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    y = all_to_all(x, "tp", split_dim=2, concat_dim=1)
    return x + all_to_all(y, "tp", split_dim=dim, concat_dim=2)


def without_another(dim: int, x: Tensor, up: Tensor, down: Tensor) -> Tensor:
    h = torch.relu(all_gather(x, "tp", dim=1, dst=R) @ up)
    return reduce_scatter(h @ down, "tp", dim=dim) + x.new_zeros(5, 3, 4)


ALONG: Final[dict[str, tuple[Callable[..., Tensor], int]]] = {
    "a residual of scattered rows": (scattered, 0),
    "a norm of scattered columns": (normed, 2),
    "columns joined": (joined, 2),
    "a residual of what is taken": (taken, 0),
    "a residual of what is exchanged": (exchanged, 0),
}


@pytest.mark.parametrize("name", ALONG)
def test_shapes_that_do_not_meet_name_the_dim_of_a_collective(name: str) -> None:
    body, wrong = ALONG[name]
    specs, out = (P(None, "tp"), P(None, "tp"), P("tp")), P(None, "tp")
    args = [torch.randn(s, dtype=torch.float64) for s in ((4, 6, 4), (4, 8), (8, 4))]
    args = [x.requires_grad_() for x in args]
    mesh, one = (make_mesh((n,), ("tp",), kind="simulated") for n in (2, 1))
    with pytest.raises(RuntimeError) as error:
        shard_map(partial(body, wrong), mesh=mesh, in_specs=specs, out_specs=out)(*args)
    hold("meant.txt", name, error.value.__notes__[-1])
    found, expected = (
        shard_map(partial(body, 1), mesh=m, in_specs=specs, out_specs=out)(*args)
        for m in (mesh, one)
    )
    torch.testing.assert_close(found, expected)
    gradients = [
        torch.autograd.grad(y.square().sum(), args, allow_unused=True) for y in (found, expected)
    ]
    torch.testing.assert_close(*gradients)


def test_a_change_that_is_not_enough_is_told_once_for_both_types() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        best = (x @ w).argmax(-1).double()
        return all_reduce(best.mean(), "tp", op="mean", dst=I)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    specs = P(), P(None, "tp")
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=P(), check="global")
    with pytest.raises(ShardTypeError) as error:
        mapped(torch.randn(8, 4).double(), torch.randn(4, 6).double())
    hold("meant.txt", "the place of the largest", str(error.value))


def test_no_dim_is_named_where_none_is_right() -> None:
    specs, out = (P(None, "tp"), P(None, "tp"), P("tp")), P(None, "tp")
    args = [torch.randn(s, dtype=torch.float64) for s in ((4, 6, 4), (4, 8), (8, 4))]
    mesh = make_mesh((2,), ("tp",), kind="simulated")
    with pytest.raises(RuntimeError) as error:
        shard_map(partial(without_another, 0), mesh=mesh, in_specs=specs, out_specs=out)(*args)
    assert not any("Tried" in note for note in error.value.__notes__)


def by_its_number(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 3 // 2, 8)


def by_what_is_left(x: Tensor) -> Tensor:
    parts: Tensor = x.unflatten(-1, (-1, 8))
    return parts


def by_that_of_one_device(x: Tensor) -> Tensor:
    return x.reshape(*x.shape[:2], 3, 8)


def by_its_size(x: Tensor) -> Tensor:
    return x.view(*x.shape[:2], 3, -1)


HEADS: Final[dict[str, tuple[Callable[[Tensor], Tensor], Any]]] = {
    "heads by number": (by_its_number, "global"),
    "heads that are left": (by_what_is_left, True),
    "heads of one device": (by_that_of_one_device, "global"),
    "heads by size": (by_its_size, "global"),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_that_do_not_divide_are_counted(name: str) -> None:
    split, check = HEADS[name]

    def body(x: Tensor, w: Tensor) -> Tensor:
        return split(x @ w).softmax(-1).flatten(2)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    specs = P(), P(None, "tp")
    out = P(None, None, "tp")
    mapped = shard_map(body, mesh=mesh, in_specs=specs, out_specs=out, check=check)
    with pytest.raises((RuntimeError, ShardTypeError)) as error:
        mapped(torch.randn(2, 4, 24), torch.randn(24, 24))
    notes = getattr(error.value, "__notes__", [])
    hold("meant.txt", name, "\n".join([str(error.value), *notes]))


def test_other_views_that_fail_count_no_heads() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        return (x @ w).view(8, 4, -1)  # the rows of one device

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    mapped = shard_map(body, mesh=mesh, in_specs=(P("dp"), P()), out_specs=P("dp"))
    with pytest.raises(RuntimeError, match=r"^shape '\[8, 4, -1\]' is invalid for input of size 4"):
        mapped(torch.ones(8, 4), torch.ones(4, 10))

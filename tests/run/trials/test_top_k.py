"""check="global" by numbers: the largest of a sharded row, from each rank's own."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    check_program,
    explain,
    make_mesh,
    shard_map,
)

Pair = tuple[Tensor, Tensor]
Body = Callable[..., Any]

ROW: Final = P(None, "tp")


def program(body: Body, ranks: int, in_specs: Any = ROW) -> Body:
    mesh = make_mesh((ranks,), ("tp",), kind="simulated")
    return shard_map(body, mesh=mesh, in_specs=in_specs, out_specs=P(), check="global")


def own(x: Tensor, k: int, is_sorted: bool, largest: bool) -> Pair:
    if not is_sorted:
        return x.topk(k, -1, largest=largest)
    values, at = x.sort(-1, descending=largest)
    return values[..., :k], at[..., :k]


def top(x: Tensor, k: int, *, sort: bool = False, largest: bool = True, off: int = 0) -> Pair:
    """The k largest of each row, with their columns."""
    values, at = own(x, min(k - off, x.shape[-1]), sort, largest)
    at = at + axis_index("tp") * x.shape[-1]
    values, at = (all_gather(y, "tp", dim=-1, dst=I) for y in (values, at))
    values, best = values.topk(k, -1, largest=largest)
    return values, at.gather(-1, best)


def largest(x: Tensor) -> Tensor:
    return all_reduce(x.amax(-1, keepdim=True), "tp", op="max", dst=I)


def shares(x: Tensor, of: float = float("inf")) -> Tensor:
    """Softmax; of numbers beyond `of` other ones."""
    e = (x - largest(x.detach())).exp()
    e = torch.where(x > of, e * axis_size("tp"), e) if of < float("inf") else e
    return e / all_reduce(e.sum(-1, keepdim=True), "tp", dst=I)


def most_likely(x: Tensor) -> Pair:
    values, at = top(shares(x), 4)
    return values * (values.cumsum(-1) - values < 0.5), at


def padded(x: Tensor) -> Pair:
    columns = axis_index("tp") * x.shape[-1] + torch.arange(x.shape[-1])
    return top(torch.where(columns < 37, x, float("-inf")), 3)


def maximum(x: Tensor) -> Pair:
    values, at = x.max(-1)
    return values, at


def place(
    x: Tensor,
    own: Callable[[Tensor], Pair] = maximum,
    at_top: Callable[[Tensor, Tensor], Tensor] = torch.eq,
    op: Any = "min",
    off: Callable[[int], Any] = lambda n: axis_index("tp") * n,
    other: int = 10**9,
) -> Tensor:
    """The column of the largest of each row, of those of ranks that have it."""
    best, at = own(x)
    is_top = at_top(best, all_reduce(best, "tp", op="max", dst=I))
    return all_reduce(torch.where(is_top, at + off(x.shape[-1]), other), "tp", op=op, dst=I)


def by_argmax(x: Tensor) -> Pair:
    return x.amax(-1), x.argmax(-1)


def filled(x: Tensor, is_number: Callable[[Tensor], Tensor] = lambda y: y == y) -> Tensor:
    """The largest, with a number in place of a rank's own that is none."""
    own = x.amax(-1).detach()
    return all_reduce(torch.where(is_number(own), own, 7.0), "tp", op="max", dst=I)


RIGHT: Final[dict[str, tuple[Body, int, tuple[int, ...]]]] = {
    "places of the largest": (place, 2, (6, 8)),
    "of four ranks": (place, 4, (6, 16)),
    "by argmax": (lambda x: place(x, by_argmax), 2, (6, 8)),
    "by no less": (lambda x: place(x, at_top=torch.ge), 2, (6, 8)),
    "by not less": (lambda x: place(x, at_top=lambda a, b: ~(a < b)), 2, (6, 8)),
    "of views": (lambda x: place(x.detach()[None].squeeze(0)), 2, (6, 8)),
    "eight ranks": (lambda x: top(x, 3), 8, (3, 80)),
    "eight ranks, all in one part": (lambda x: top(x, 8), 8, (3, 80)),
    "eight ranks, one row": (lambda x: top(x, 3), 8, (1, 80)),
    "16 ranks": (lambda x: top(x, 5), 16, (2, 160)),
    "few columns": (lambda x: top(x, 2), 2, (3, 8)),
    "half of the columns": (lambda x: top(x, 2), 2, (3, 4)),
    "all columns of a rank": (lambda x: top(x, 4), 4, (3, 16)),
    "more than a rank has": (lambda x: top(x, 6), 4, (3, 16)),
    "the smallest": (lambda x: top(x, 3, largest=False), 4, (3, 40)),
    "sorted": (lambda x: top(x, 3, sort=True), 4, (3, 40)),
    "of shares, which may underflow": (lambda x: top(shares(x), 3), 4, (3, 40)),
    "the most likely ones": (most_likely, 4, (3, 40)),
    "of a vocabulary with padding": (padded, 4, (3, 40)),
    "with the first alone": (lambda x: top(x, 4)[1][..., :1], 4, (3, 40)),
}


@pytest.mark.sample(4, "places of the largest", "few columns", "of shares, which may underflow")
@pytest.mark.parametrize("name", RIGHT)
def test_the_largest_of_a_sharded_row_are_tried_with_each_part_the_highest(name: str) -> None:
    body, ranks, shape = RIGHT[name]
    x = torch.randn(shape, dtype=torch.float64)
    assert explain(program(body, ranks), x).one_device == "tried"


@pytest.mark.parametrize("rows", [1, 2])
def test_the_largest_of_a_sharded_product_are_tried(rows: int) -> None:
    f = program(lambda h, w: top(h @ w, 3), 8, (P(), ROW))
    args = (torch.randn(rows, 16), torch.randn(16, 80))
    assert explain(f, *args).one_device == "tried"
    torch.testing.assert_close(f(*args)[1], (args[0] @ args[1]).topk(3).indices)


def with_zeros(x: Tensor) -> Pair:
    values, at = top(x, 2)
    is_empty = all_reduce((x == 0).all().double(), "tp", op="max", dst=I)
    return values * (1 + is_empty * (axis_size("tp") - 1)), at


def counted(x: Tensor) -> Pair:
    values, at = top(x, 2)
    few = all_reduce((x.abs() < 1e-30).sum(), "tp", dst=I) > 2 * axis_size("tp")
    return values * torch.where(few, 2.0, 1.0), at


def tied(x: Tensor, weighs: int) -> Pair:
    """Counts the ranks that have the maximum; of values, or of columns."""
    have = all_reduce((x == largest(x)).any(-1, keepdim=True).long(), "tp", dst=I)
    values, at = top(x, 3)
    return (values * have, at) if weighs == 0 else (values, at * have)


def whole_gradient(x: Tensor) -> Pair:
    values, at = top(x.detach(), 3)
    return values + largest(x), at


def last_of_equal(x: Tensor) -> tuple[Tensor, ...]:
    """Takes, of equal maxima, the one of the last rank, beside what is in any order."""
    values, at = x.max(-1, keepdim=True)
    at = at + axis_index("tp") * x.shape[-1]
    values, at = (all_gather(y.flip(-1), "tp", dim=-1, dst=I).flip(-1) for y in (values, at))
    return at.gather(-1, values.argmax(-1, keepdim=True)), *top(x, 2)


WRONG: Final[dict[str, tuple[Body, int, tuple[int, ...]]]] = {
    "places of a shard": (lambda x: place(x, off=lambda n: 0), 2, (6, 8)),
    "places summed": (lambda x: place(x, op="sum", other=0), 2, (6, 8)),
    "places summed, by argmax": (lambda x: place(x, by_argmax, op="sum", other=0), 2, (6, 8)),
    "the last of equal ones": (lambda x: place(x, op="max", other=-1), 2, (6, 8)),
    "places by ranks": (lambda x: place(x, off=lambda n: axis_index("tp")), 2, (6, 8)),
    "a place that others have": (lambda x: place(x, other=5), 2, (6, 8)),
    "what is not the largest": (lambda x: place(x, at_top=torch.ne), 2, (6, 8)),
    "what is no more": (lambda x: place(x, at_top=torch.le), 2, (6, 8)),
    "a number for none": (filled, 2, (6, 8)),
    "one that isnan sees": (lambda x: filled(x, lambda y: ~y.isnan()), 2, (6, 8)),
    "one too few of each": (lambda x: top(x, 3, off=int(axis_size("tp") > 1)), 8, (3, 80)),
    "seven of eight, one row": (lambda x: top(x, 8, off=int(axis_size("tp") > 1)), 8, (1, 80)),
    "too few of few": (lambda x: top(x, 2, off=int(axis_size("tp") > 1)), 2, (3, 8)),
    "where a rank has zeros": (with_zeros, 2, (3, 8)),
    "where the mesh has more of them": (counted, 4, (3, 16)),
    "by how many ranks share it": (lambda x: tied(x, 0), 4, (3, 40)),
    "columns by how many do": (lambda x: tied(x, 1), 4, (3, 40)),
    "a gradient on each rank with it": (whole_gradient, 4, (3, 40)),
    "beside equal maxima": (last_of_equal, 2, (3, 8)),
    "shares beyond a number": (lambda x: top(shares(x, 50.0), 3), 4, (3, 40)),
    "a rank's own shares": (lambda x: top(x.softmax(-1), 3), 4, (3, 40)),
}


@pytest.mark.sample(
    4,
    "places summed",
    "a number for none",
    "where a rank has zeros",
    "a gradient on each rank with it",
)
@pytest.mark.parametrize("name", WRONG)
def test_other_largest_ones_and_what_is_wrong_beside_equal_ones_are_refused(name: str) -> None:
    body, ranks, shape = WRONG[name]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=name.startswith("a gradient"))
    with pytest.raises(ShardTypeError):
        check_program(program(body, ranks), x)

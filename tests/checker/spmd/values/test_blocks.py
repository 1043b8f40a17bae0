"""Blocks between dim 0 and another, as Megatron gathers and scatters, against one device."""

from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as functional

from shardmap_torch import (
    I,
    P,
    ShardTypeError,
    all_gather,
    all_reduce,
    axis_group,
    axis_size,
    check_program,
    reduce_scatter,
    shard_map,
)
from tests.checker.support.one_device import (
    ONE,
    RANKS,
    assert_is_one_device,
    assert_is_refused,
    numbers,
    outcome_on,
)

Body = Callable[..., Tensor]

pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

X: Final = numbers(4, 8)
W: Final = numbers(8, 6)
COLUMNS: Final = (P("a", "b"), P())
INNER: Final = (P("a", "b"), P("b"))
ROWS: Final = P("a")
PARTS: Final = P("a", "b")


def gathered(x: Tensor, dim: int = 1) -> Tensor:
    behind = all_gather(x, "b", dim=0, dst=I)
    return torch.cat(behind.chunk(axis_size("b"), 0), dim)


def gathers(x: Tensor, w: Tensor) -> Tensor:
    return (gathered(x.sin()) @ w).tanh()


def scatters(x: Tensor, w: Tensor) -> Tensor:
    count = axis_size("b")
    y = x.sin() @ w
    blocks = torch.split(y, y.shape[1] // count, dim=1)
    return reduce_scatter(torch.cat(blocks, 0), "b", dim=0).tanh()


def there_and_back(x: Tensor, w: Tensor) -> Tensor:
    """The blocks of a sum lie behind one another while it is pending."""
    count = axis_size("b")
    behind = torch.cat((x @ w).chunk(count, 1))
    both = torch.cat(behind.chunk(count), -1)
    return all_reduce(both, "b", dst=I)


RIGHT: Final = [
    (gathers, COLUMNS, ROWS),
    (scatters, INNER, PARTS),
    (there_and_back, INNER, ROWS),
]


@pytest.mark.parametrize(("body", "specs", "out"), RIGHT)
def test_blocks_that_are_joined_in_order_are_those_of_one_device(
    body: Body, specs: Any, out: P
) -> None:
    assert_is_one_device(body, (X, W), specs, out)


def columns_by_torch(mesh: Any) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        count = axis_size("b")
        out = torch.empty(count * x.shape[0], *x.shape[1:], dtype=x.dtype)
        dist.all_gather_into_tensor(out, x.detach().contiguous(), group=axis_group(mesh, "b"))
        return torch.cat(out.chunk(count), -1).cumsum(1)

    return body


def functional_columns_by_torch(mesh: Any) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y: Tensor = functional.all_gather_tensor(x.detach(), 1, axis_group(mesh, "b"))
        return y.cumsum(1)

    return body


def sums_by_torch(mesh: Any) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        count, y = axis_size("b"), x.detach() @ w.detach()
        out = torch.empty(y.shape[0], y.shape[1] // count, dtype=y.dtype)
        behind = torch.cat(y.chunk(count, dim=1))
        dist.reduce_scatter_tensor(out, behind, group=axis_group(mesh, "b"))
        return out.tanh()

    return body


def functional_sums_by_torch(mesh: Any) -> Body:
    def body(x: Tensor, w: Tensor) -> Tensor:
        y, group = x.detach() @ w.detach(), axis_group(mesh, "b")
        found: Tensor = functional.reduce_scatter_tensor(y, "sum", 1, group)
        return found.tanh()

    return body


@pytest.mark.parametrize(
    ("make", "specs", "out"),
    [
        (columns_by_torch, COLUMNS, ROWS),
        (functional_columns_by_torch, COLUMNS, ROWS),
        (sums_by_torch, INNER, PARTS),
        (functional_sums_by_torch, INNER, PARTS),
    ],
)
def test_calls_of_torch_along_another_dim_are_those_of_one_device(
    make: Callable[[Any], Body], specs: Any, out: P
) -> None:
    found, expected = (outcome_on(m, make(m), (X, W), specs, out) for m in (RANKS, ONE))
    torch.testing.assert_close(found, expected)


def blocks(x: Tensor) -> list[Tensor]:
    return list(all_gather(x, "b", dim=0, dst=I).chunk(axis_size("b")))


def joined_in_another_order(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(blocks(x)[::-1], 1)


def joined_but_one(x: Tensor, w: Tensor) -> Tensor:
    found = blocks(x)
    return torch.cat([*found[:1], *found[:1]] if len(found) > 1 else found, 1)


def one_alone(x: Tensor, w: Tensor) -> Tensor:
    return blocks(x)[0].sin()


def behind_one_another(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat(blocks(x), 0).sin()


def of_other_sizes(x: Tensor, w: Tensor) -> Tensor:
    behind = all_gather(x, "b", dim=0, dst=I)
    return torch.cat(behind.chunk(2 * axis_size("b"))[:2], 1)


def beside_another(x: Tensor, w: Tensor) -> Tensor:
    return torch.cat([blocks(x)[0], *blocks(x.sin())[1:]], 1)


@pytest.mark.parametrize(
    ("body", "text"),
    [
        (joined_in_another_order, "other blocks of a dim than all of them, in order"),
        (joined_but_one, "other blocks of a dim than all of them, in order"),
        (beside_another, "other blocks of a dim than all of them, in order"),
        (one_alone, "sin is not what .*: self has values of several ranks"),
        (behind_one_another, "2 blocks of dim 1, .* in dim 0(?s:.*)gather with dim=1"),
        (of_other_sizes, "it gives 4 tensors on a rank and 2 on one device"),
    ],
)
def test_blocks_that_are_used_otherwise_are_refused(body: Body, text: str) -> None:
    assert_is_refused(body, (X, W), COLUMNS, ROWS, text)


def test_a_scatter_of_another_dim_than_the_blocks_lie_in_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Tensor:
        behind = torch.cat((x.sin() @ w[:, :4]).chunk(axis_size("b"), 1))
        return reduce_scatter(behind, "b", dim=1)

    text = "it scatters values of several ranks along another dim"
    assert_is_refused(body, (X, W), INNER, PARTS, text)


def test_the_error_of_a_join_says_how_blocks_are_joined() -> None:
    mapped = shard_map(
        joined_in_another_order, mesh=RANKS, in_specs=COLUMNS, out_specs=ROWS, check="global"
    )
    with pytest.raises(ShardTypeError) as caught:
        check_program(mapped, X, W)
    first, *_, last = str(caught.value).splitlines()
    assert first == (
        "joined_in_another_order: check='global': cat is not what it is on one device: it joins "
        "other blocks of a dim than all of them, in order."
    )
    assert last == ("Fix: join what chunk(n) gave: torch.cat(x.chunk(n, dim), other_dim).")

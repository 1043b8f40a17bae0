"""`all_to_all` along one dim, as torch.distributed does it: blocks and ranks trade places."""

from collections.abc import Callable
from itertools import product
from random import Random
from typing import Any, Final

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import I, P, all_reduce, all_to_all, axis_group
from shardmap_torch.checker.spmd.layout import Dim, merged
from shardmap_torch.checker.spmd.ops.collective_rules import exchanged
from tests.checker.support.one_device import (
    RANKS,
    assert_is_one_device,
    assert_is_refused,
    numbers,
)

# torch renames some calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Body = Callable[[Tensor], Tensor]

X: Final = numbers(8, 4)
GROUP: Final[Any] = axis_group(RANKS, "a")
SPEC: Final = P(("a", "b"))


def exchange(x: Tensor, axis: Any = "a") -> Tensor:
    return all_to_all(x, axis, split_dim=0, concat_dim=0)


def both_ways(x: Tensor) -> Tensor:
    return exchange(exchange(x).tanh() * 2)


def over_both_axes(x: Tensor) -> Tensor:
    return exchange(exchange(torch.cat([x, x.cos()], 1), ("a", "b")).tanh(), ("a", "b"))


def summed(x: Tensor) -> Tensor:
    return all_reduce(exchange(x).sin().sum(0), ("a", "b"), dst=I)


def differentiated(x: Tensor) -> Tensor:
    def loss(x: Tensor) -> Tensor:
        return all_reduce(exchange(x).square().sum(), ("a", "b"), dst=I)

    found: Tensor = torch.func.grad(loss)(x)
    return found


def raw(x: Tensor) -> Tensor:
    there, back = torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(there, x.detach(), group=GROUP)
    dist.all_to_all_single(back, there.square(), group=GROUP)
    return back


def into_other_memory(x: Tensor) -> Tensor:
    kept, memory = x * 1, x.sin()
    memory.copy_(exchange(kept))
    return kept + exchange(memory.tanh())


RIGHT: Final[list[tuple[Body, P]]] = [
    (both_ways, SPEC),
    (over_both_axes, SPEC),
    (summed, P()),
    (differentiated, SPEC),
    (raw, SPEC),
    (into_other_memory, SPEC),
]


@pytest.mark.parametrize(("body", "out"), RIGHT)
def test_programs_that_exchange_blocks_equal_one_device(body: Body, out: P) -> None:
    rows = 16 if body is over_both_axes else 8
    assert_is_one_device(body, (numbers(rows, 4),), SPEC, out)


def added_to_itself(x: Tensor) -> Tensor:
    return exchange(exchange(x) + x)


def in_halves(x: Tensor) -> Tensor:
    y = exchange(x)
    return exchange(torch.cat([y[:1], 2 * y[1:]]))


def by_position(x: Tensor) -> Tensor:
    y = exchange(x)
    return exchange(y * torch.arange(y.shape[0], dtype=y.dtype)[:, None])


def in_another_order(x: Tensor) -> Tensor:
    return exchange(exchange(torch.cat([x, x.cos()], 1), ("a", "b")), ("b", "a"))


def read_through_a_view(x: Tensor) -> Tensor:
    memory = x * 1
    rows = memory.unsqueeze(0)
    memory.copy_(exchange(x))
    return rows.squeeze(0)


def into_a_part(x: Tensor) -> Tensor:
    memory = x * 1
    memory[:, :2].copy_(exchange(x)[:, :2])
    return exchange(memory)


def of_blocks_of_all(x: Tensor) -> Tensor:
    return all_to_all(x.T, "a", split_dim=0, concat_dim=0).T


BLOCKS: Final = "within each of 2 blocks"
WRONG: Final = [
    (exchange, BLOCKS),
    (added_to_itself, BLOCKS),
    (in_halves, "takes a part of dim 0, which is sharded"),
    (by_position, "counts the entries that a rank has"),
    (in_another_order, "it exchanges blocks of dim 0 over 'b', 'a', and that dim is sharded"),
    (read_through_a_view, "is not what it is on one device"),
    (into_a_part, BLOCKS),
    (of_blocks_of_all, "it exchanges blocks of dim 0 over 'a', and that dim is unsharded"),
]


@pytest.mark.parametrize(("body", "text"), WRONG)
def test_what_mixes_up_blocks_and_ranks_is_refused(body: Body, text: str) -> None:
    assert_is_refused(body, (numbers(16, 4),), SPEC, SPEC, text)


SIZES: Final = {"a": 2, "b": 3, "c": 2}


def positions(dim: Dim) -> dict[tuple[int, ...], list[int]]:
    """Lists the positions that each rank has, in the order in which it has them."""
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in product(*map(range, SIZES.values())):
        own = dict(zip(SIZES, rank, strict=True))
        found[rank] = []
        for local in product(*(range(base) for axis, base in dim if axis is None)):
            rest, position = iter(local), 0
            for axis, base in dim:
                position = position * base + (next(rest) if axis is None else own[axis])
            found[rank].append(position)
    return found


def test_the_layout_of_exchanged_blocks_is_where_they_are() -> None:
    draw = Random(0)
    num_known = 0
    for _ in range(1000):
        digits: list[Any] = [(axis, SIZES[axis]) for axis in draw.sample("abc", draw.randint(1, 3))]
        for _ in range(draw.randint(1, 3)):
            digits.insert(draw.randint(0, len(digits)), (None, draw.choice([2, 3, 4, 6, 12])))
        dim, over = tuple(merged(digits)), tuple(draw.sample("abc", draw.randint(1, 2)))
        layout = exchanged(dim, over, SIZES)
        if layout is None:
            continue
        num_known += 1
        before, after = positions(dim), positions(layout)
        for rank, have in after.items():
            own = dict(zip(SIZES, rank, strict=True))
            peers = list(product(*(range(SIZES[axis]) for axis in over)))
            block = len(have) // len(peers)
            start = peers.index(tuple(own[axis] for axis in over)) * block
            sent = [
                before[tuple((own | dict(zip(over, peer, strict=True))).values())] for peer in peers
            ]
            assert have == [at for each in sent for at in each[start : start + block]]
    assert num_known > 100

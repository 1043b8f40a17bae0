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
from tests.checker.support.one_device import RANKS, assert_is_one_device, assert_is_refused, numbers

# torch renames some calls.
pytestmark = pytest.mark.filterwarnings("ignore:.*deprecated:FutureWarning")

Body = Callable[[Tensor], Tensor]

GROUP: Final[Any] = axis_group(RANKS, "a")
SPEC: Final = P(("a", "b"))
SIZES: Final = {"a": 2, "b": 3, "c": 2}


def exchange(x: Tensor, axis: Any = "a") -> Tensor:
    return all_to_all(x, axis, split_dim=0, concat_dim=0)


def twice(x: Tensor, first: Any, second: Any) -> Tensor:
    return exchange(exchange(torch.cat([x, x.cos()], 1), first).tanh(), second)


def total(x: Tensor) -> Tensor:
    return all_reduce(x, ("a", "b"), dst=I)


def raw(x: Tensor) -> Tensor:
    received, back = torch.empty_like(x), torch.empty_like(x)
    dist.all_to_all_single(received, x.detach(), group=GROUP)
    dist.all_to_all_single(back, received.square(), group=GROUP)
    return back


def into_other_memory(x: Tensor) -> Tensor:
    kept, memory = x * 1, x.sin()
    memory.copy_(exchange(kept))
    return kept + exchange(memory.tanh())


RIGHT: Final[list[tuple[Body, P]]] = [
    (lambda x: exchange(exchange(x).tanh() * 2), SPEC),
    (lambda x: twice(x, ("a", "b"), ("a", "b")), SPEC),
    (lambda x: total(exchange(x).sin().sum(0)), P()),
    (torch.func.grad(lambda x: total(exchange(x).square().sum())), SPEC),
    (raw, SPEC),
    (into_other_memory, SPEC),
]


@pytest.mark.parametrize(("body", "out"), RIGHT)
def test_programs_that_exchange_blocks_equal_one_device(body: Body, out: P) -> None:
    assert_is_one_device(body, (numbers(16, 4),), SPEC, out)


def scaled(x: Tensor) -> Tensor:
    return x * torch.arange(x.shape[0], dtype=x.dtype)[:, None]


def read_through_a_view(x: Tensor) -> Tensor:
    memory = x * 1
    rows = memory.unsqueeze(0)
    memory.copy_(exchange(x))
    return rows.squeeze(0)


def into_a_part(x: Tensor) -> Tensor:
    memory = x * 1
    memory[:, :2].copy_(exchange(x)[:, :2])
    return exchange(memory)


WRONG: Final[list[Body]] = [
    exchange,
    lambda x: exchange(exchange(x) + x),
    lambda x: exchange(torch.cat([exchange(x)[:1], 2 * exchange(x)[1:]])),
    lambda x: exchange(scaled(exchange(x))),
    lambda x: twice(x, ("a", "b"), ("b", "a")),
    read_through_a_view,
    into_a_part,
    lambda x: exchange(x.T).T,
]


@pytest.mark.parametrize("body", WRONG)
def test_what_mixes_up_blocks_and_ranks_is_refused(body: Body) -> None:
    assert_is_refused(body, (numbers(16, 4),), SPEC, SPEC)


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
    draw, num_known = Random(0), 0
    for _ in range(1000):
        digits: list[Any] = [(axis, SIZES[axis]) for axis in draw.sample("abc", draw.randint(1, 3))]
        for _ in range(draw.randint(1, 3)):
            digits.insert(draw.randint(0, len(digits)), (None, draw.choice([2, 3, 4, 6, 12])))
        dim, over = tuple(merged(digits)), tuple(draw.sample("abc", draw.randint(1, 2)))
        if (layout := exchanged(dim, over, SIZES)) is None:
            continue
        num_known += 1
        before = positions(dim)
        for rank, have in positions(layout).items():
            own = dict(zip(SIZES, rank, strict=True))
            peers = list(product(*(range(SIZES[axis]) for axis in over)))
            block = len(have) // len(peers)
            start = peers.index(tuple(own[axis] for axis in over)) * block
            sent = [
                before[tuple((own | dict(zip(over, peer, strict=True))).values())] for peer in peers
            ]
            assert have == [at for each in sent for at in each[start : start + block]]
    assert num_known > 100

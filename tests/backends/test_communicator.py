"""The communicator on gloo: what its moves give, and how their waits end."""

import random
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.backends import communicator
from shardmap_torch.backends.communicator import GlooWire
from shardmap_torch.control import waiting
from shardmap_torch.control.waiting import PeerWatch, StuckError, Waiting
from tests.support.pool import Gloo

X = torch.arange(8.0).reshape(4, 2)
LARGE = torch.ones(4, 2**18)
COLLECTIVES: Mapping[str, Callable[[GlooWire], Tensor]] = {
    "reduce": lambda wire: wire.reduce(X, "sum"),
    "gather": lambda wire: wire.gather(X),
    "gather_along": lambda wire: wire.gather_along(X, 0),
    "sum_scatter": lambda wire: wire.sum_scatter(X[:2]),
    "sum_scatter_along": lambda wire: wire.sum_scatter_along(X, 1),
    "exchange": lambda wire: wire.exchange(X[:2]),
    "exchange_rows": lambda wire: wire.exchange_rows(X, (2, 2), (2, 2)),
    "broadcast": lambda wire: wire.broadcast(X, 1),
}
MESSAGES: Mapping[str, Callable[[GlooWire], Tensor]] = {
    "gather": lambda wire: wire.gather(LARGE),
    "gather_along": lambda wire: wire.gather_along(LARGE, 0),
    "sum_scatter": lambda wire: wire.sum_scatter(LARGE[:2]),
    "sum_scatter_along": lambda wire: wire.sum_scatter_along(LARGE, 1),
    "exchange": lambda wire: wire.exchange(LARGE[:2]),
    "permute": lambda wire: wire.permute(X, [(0, 1), (1, 0)]),
}
LATE = 0.6  # seconds


def wire_over(group: dist.ProcessGroup | None) -> GlooWire:
    assert group is not None
    return GlooWire(group, dist.get_world_size(group), dist.get_rank(group))


def interrupted(name: str) -> tuple[float, bool]:
    """Returns when the wait of rank 0 ended that had less patience, and if its work had not."""
    move, wire = COLLECTIVES[name], wire_over(dist.group.WORLD)
    found: list[tuple[float, bool]] = []

    class Impatient(GlooWire):
        def _wait(self, work: dist.Work) -> None:
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=1))
            found.append((time.monotonic() - began, not work.is_completed()))
            super()._wait(work)

    dist.barrier()
    if wire.rank == 1:
        time.sleep(LATE)
        move(wire)
        return 0.0, True
    move(Impatient(wire.group, 2, 0))
    return found[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", list(COLLECTIVES))
def test_a_wait_for_a_late_rank_can_be_interrupted(name: str, gloo: Gloo) -> None:
    (seconds, is_open), _ = gloo(2).run(interrupted, name)
    assert seconds < LATE / 2
    assert is_open


class Hopeless(Waiting):
    """Finds at every look that the wait cannot end."""

    is_blocked = False

    def __init__(self) -> None:
        pass

    def look_out(self) -> None:
        raise StuckError([1], {})


def ended(name: str) -> str:
    """Returns the error of rank 0, which waits for a message that rank 1 never sends."""
    wire = wire_over(dist.new_group())  # which is of no use afterwards
    dist.barrier()  # both have it
    error = ""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(waiting, "PATIENCE", timedelta(milliseconds=20))
        watch = PeerWatch(Hopeless())
        patch.setattr(communicator, "peers", lambda: watch)
        if wire.rank == 0:
            with pytest.raises(StuckError) as raised:
                MESSAGES[name](wire)
            error = str(raised.value)
        watch.close()
    dist.barrier()
    return error


@pytest.mark.parametrize("name", list(MESSAGES))
def test_a_wait_for_a_message_that_never_comes_is_ended(name: str, gloo: Gloo) -> None:
    assert gloo(2).run(ended, name)[0] == "waits for ever for rank 1"


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.int8,
    torch.int64,
)


def moved(dtype: torch.dtype, large: int) -> None:
    with mock.patch.object(communicator, "_LARGE", large):
        move_all(dtype, wire_over(dist.group.WORLD))


def move_all(dtype: torch.dtype, wire: GlooWire) -> None:
    """Sums and exchanges of stacks, row r of rank s of which is 10 s + r, along both dims."""
    rank, size = wire.rank, wire.size
    stacks = (torch.arange(size)[:, None] * 10 + torch.arange(size)).to(dtype)  # [rank, row]
    mine = stacks[rank][:, None].expand(size, 2)

    def moved_to(rank: int) -> Tensor:
        source = {1: 0, 2: 2}.get(rank)
        return torch.zeros_like(mine) if source is None else stacks[source][:, None].expand(size, 2)

    total = stacks[:, rank].sum(dtype=dtype).expand(2)
    expected = {
        "sum_scatter": (wire.sum_scatter(mine), total),
        "dim 0": (wire.sum_scatter_along(mine, 0), total[None]),
        "dim 1": (wire.sum_scatter_along(mine.t(), 1), total[:, None]),
        "sum": (wire.reduce(mine, "sum"), stacks.sum(0, dtype=dtype)[:, None].expand(size, 2)),
        "max": (wire.reduce(mine, "max"), stacks[-1][:, None].expand(size, 2)),
        "min": (wire.reduce(mine, "min"), stacks[0][:, None].expand(size, 2)),
        "gather": (wire.gather(mine), stacks[:, :, None].expand(size, size, 2)),
        "along 0": (wire.gather_along(mine, 0), stacks.flatten()[:, None].expand(size**2, 2)),
        "along 1": (wire.gather_along(mine, 1), stacks.t().repeat_interleave(2, 1)),
        "permute": (wire.permute(mine, [(0, 1), (2, 2)]), moved_to(rank)),
        "exchange": (wire.exchange(mine), stacks[:, rank, None].expand(size, 2)),
        "rows": (
            wire.exchange_rows(mine.repeat_interleave(2, 0), [2] * size, [2] * size),
            stacks[:, rank, None].expand(size, 2).repeat_interleave(2, 0),
        ),
        "empty": (wire.sum_scatter(mine[:, :0]), total[:0]),
    }
    for name, (result, wanted) in expected.items():
        assert result.dtype == dtype, name
        assert torch.equal(result, wanted), name
        assert result.is_contiguous(), name


@pytest.mark.parametrize("large", [1, 2**20])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_of_every_dtype(dtype: torch.dtype, large: int, gloo: Gloo) -> None:
    gloo(3).run(moved, dtype, large)


def rounded() -> None:
    wire = wire_over(dist.group.WORLD)
    addend = torch.full((wire.size, 1), 256.0 if wire.rank == 0 else 1.0, dtype=torch.bfloat16)
    total = wire.sum_scatter(addend)
    assert total.item() == 258.0  # in bfloat16 256 + 1 is 256, and 256 + 1 + 1 too


def test_a_scattered_sum_of_halves_is_rounded_once(gloo: Gloo) -> None:
    gloo(3).run(rounded)


MIXED: Mapping[str, tuple[Callable[[GlooWire, Tensor], Tensor], Callable[..., Tensor]]] = {
    "reduce": (lambda wire, x: wire.reduce(x, "max"), lambda xs, _: xs.amax(0)),
    "gather": (lambda wire, x: wire.gather(x), lambda xs, _: xs),
    "gather_along": (lambda wire, x: wire.gather_along(x, 1), lambda xs, _: torch.cat([*xs], 1)),
    "sum_scatter": (lambda wire, x: wire.sum_scatter(x), lambda xs, rank: xs.sum(0)[rank]),
    "exchange": (lambda wire, x: wire.exchange(x), lambda xs, rank: xs[:, rank]),
    "permute": (
        lambda wire, x: wire.permute(x, [(r, r ^ 1) for r in range(wire.size)]),
        lambda xs, rank: xs[rank ^ 1],
    ),
}
"""Moves of a tensor [rank, n], and the result from all ranks' tensors stacked."""


def in_any_order(seed: int) -> None:
    """Moves on groups that overlap, by ranks that come at other times; some gathers end later."""
    shared, own = random.Random(seed), random.Random(f"{seed} {dist.get_rank()}")
    rank = dist.get_rank()
    families = [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0, 2], [1, 3]]]
    wires = [
        (ranks, wire_over(dist.new_subgroups_by_enumeration(family)[0]))
        for family in families
        for ranks in family
        if rank in ranks
    ]
    open_gathers: list[tuple[Callable[[], Tensor], Tensor]] = []
    for _ in range(100):
        (ranks, wire), name = shared.choice(wires), shared.choice([*MIXED, "start_gather"])
        n, draw = shared.choice((1, 60, 9000)), torch.Generator()
        draw.manual_seed(shared.getrandbits(30))
        xs = torch.randint(-9, 9, (4, 4, n), generator=draw).double()[ranks, : len(ranks)]
        time.sleep(own.choice((0.0, 0.0, 0.001)))
        if name == "start_gather":
            open_gathers.append((wire.start_gather(xs[wire.rank]), xs))
        else:
            move, wanted = MIXED[name]
            assert torch.equal(move(wire, xs[wire.rank]), wanted(xs, wire.rank)), name
        if shared.random() < 0.1:
            finish_all(open_gathers)
    finish_all(open_gathers)


def finish_all(gathers: list[tuple[Callable[[], Tensor], Tensor]]) -> None:
    while gathers:
        finish, wanted = gathers.pop()
        assert torch.equal(finish(), wanted)


def mixed(seed: int) -> None:
    with mock.patch.object(communicator, "_LARGE", 1000):
        in_any_order(seed)


def test_moves_of_several_groups_do_not_meet(gloo: Gloo) -> None:
    gloo(4).run(mixed, 0)

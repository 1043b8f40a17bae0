"""Waits of the communicator on gloo: each can be interrupted, and goes on where it was."""

import time
from collections.abc import Callable, Mapping
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.backends.communicator import Wire
from tests.support.pool import Gloo

X = torch.arange(8.0).reshape(4, 2)
MOVES: Mapping[str, Callable[[Wire], Tensor]] = {
    "reduce": lambda wire: wire.reduce(X, "sum"),
    "gather": lambda wire: wire.gather(X),
    "gather_along": lambda wire: wire.gather_along(X, 0),
    "sum_scatter": lambda wire: wire.sum_scatter(X[:2]),
    "sum_scatter_along": lambda wire: wire.sum_scatter_along(X, 1),
    "exchange": lambda wire: wire.exchange(X[:2]),
    "exchange_rows": lambda wire: wire.exchange_rows(X, (2, 2), (2, 2)),
    "broadcast": lambda wire: wire.broadcast(X, 1),
}
LATE = 0.6  # seconds


def interrupted(name: str) -> tuple[float, bool]:
    """Returns when the wait of rank 0 ended that had less patience, and if its work had not."""
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    found: list[tuple[float, bool]] = []

    class Impatient(Wire):
        def _wait(self, work: dist.Work) -> None:
            began = time.monotonic()
            with pytest.raises(RuntimeError):
                work.wait(timedelta(milliseconds=1))
            found.append((time.monotonic() - began, not work.is_completed()))
            super()._wait(work)

    dist.barrier()
    if rank == 1:
        time.sleep(LATE)
        MOVES[name](Wire(group, 2, rank, patient=True))
        return 0.0, True
    MOVES[name](Impatient(group, 2, rank, patient=True))
    return found[0]


@pytest.mark.parametrize("name", list(MOVES))
def test_a_wait_for_a_late_rank_can_be_interrupted(name: str, gloo: Gloo) -> None:
    (seconds, is_open), _ = gloo(2).run(interrupted, name)
    assert seconds < LATE / 2
    assert is_open


DTYPES = (
    torch.float32,
    torch.bfloat16,
    torch.complex64,
    torch.int8,
    torch.int64,
)


def moved(dtype: torch.dtype) -> None:
    """Sums and exchanges of stacks, row r of rank s of which is 10 s + r, along both dims."""
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    wire = Wire(group, size, rank, patient=True)
    stacks = (torch.arange(size)[:, None] * 10 + torch.arange(size)).to(dtype)  # [rank, row]
    mine = stacks[rank][:, None].expand(size, 2)
    total = stacks[:, rank].sum(dtype=dtype).expand(2)
    expected = {
        "sum_scatter": (wire.sum_scatter(mine), total),
        "dim 0": (wire.sum_scatter_along(mine, 0), total[None]),
        "dim 1": (wire.sum_scatter_along(mine.t(), 1), total[:, None]),
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


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_moves_of_every_dtype(dtype: torch.dtype, gloo: Gloo) -> None:
    gloo(3).run(moved, dtype)


def rounded() -> None:
    rank, size, group = dist.get_rank(), dist.get_world_size(), dist.group.WORLD
    assert group is not None
    addend = torch.full((size, 1), 256.0 if rank == 0 else 1.0, dtype=torch.bfloat16)
    total = Wire(group, size, rank, patient=True).sum_scatter(addend)
    assert total.item() == 258.0  # in bfloat16 256 + 1 is 256, and 256 + 1 + 1 too


def test_a_scattered_sum_of_halves_is_rounded_once(gloo: Gloo) -> None:
    gloo(3).run(rounded)

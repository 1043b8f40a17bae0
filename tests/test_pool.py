"""The worker pool returns what ranks return, and turns every way to fail into a prompt report."""

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.support.pool import MAX_THREADS, Gloo, Pool, WorkerError


@dataclass(frozen=True)
class Scaled:
    """A class of this module, to prove that its instances travel both ways."""

    factor: int


@pytest.fixture
def pool() -> Iterator[Pool]:
    fresh = Pool(2)
    yield fresh
    fresh.close()


def rank_times(scaled: Scaled) -> Scaled:
    return Scaled(scaled.factor * dist.get_rank())


def summed(x: torch.Tensor) -> torch.Tensor:
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def process_id() -> int:
    return os.getpid()


def raise_on(rank: int) -> None:
    print(f"about to work on {dist.get_rank()}")
    if dist.get_rank() == rank:
        raise KeyError(f"rank {rank} is unhappy")


def raise_before_collective(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("left the others alone")
    dist.barrier()


def die_on(rank: int) -> None:
    print("last words")
    if dist.get_rank() == rank:
        os._exit(7)
    dist.barrier()


def sleep_on(rank: int) -> None:
    print("about to sleep")
    if dist.get_rank() == rank:
        time.sleep(60)


def leave_state_behind() -> None:
    torch.set_default_dtype(torch.float64)
    torch.set_grad_enabled(False)
    torch.manual_seed(dist.get_rank() + 17)


def global_state() -> tuple[torch.dtype, bool, float, int]:
    state = torch.get_default_dtype(), torch.is_grad_enabled(), torch.rand(()).item()
    return (*state, torch.get_num_threads())


def unpicklable(rank: int) -> object:
    return (lambda: None) if dist.get_rank() == rank else None


@pytest.mark.parametrize("size", [2, 3])
def test_every_size_is_a_world_whose_results_come_in_rank_order(gloo: Gloo, size: int) -> None:
    assert gloo(size).run(rank_times, Scaled(10)) == [Scaled(10 * rank) for rank in range(size)]
    results = gloo(size).run(summed, torch.ones(3))
    assert [result.tolist() for result in results] == [[size * (size + 1) / 2] * 3] * size


def test_a_run_does_not_see_the_state_an_earlier_one_left(pool: Pool) -> None:
    before = pool.run(global_state)
    pool.run(leave_state_behind)
    assert pool.run(global_state) == before
    assert before[0] == before[1]


FAILURES: dict[str, tuple[Callable[..., Any], dict[str, Any], list[str]]] = {
    "raises": (
        raise_on,
        {},
        [
            "rank 0 of 2 returned normally\n--- output of rank 0 ---\nabout to work on 0",
            "rank 1 of 2 raised\nTraceback (most recent call last):",
            "in raise_on\n    raise KeyError",
            "--- output of rank 1 ---\nabout to work on 1",
        ],
    ),
    "leaves the other alone": (
        raise_before_collective,
        {},
        ["ValueError: left", "rank 0 of 2 did not answer in time", "in raise_before_collective"],
    ),
    "dies": (
        die_on,
        {},
        ["rank 1 of 2 died with exit code 7", "--- output of rank 1 ---\nlast words"],
    ),
    "hangs": (
        sleep_on,
        {"timeout": 0.5},
        [
            "rank 1 of 2 did not answer in time",
            "--- output of rank 1 ---\nabout to sleep",
            "in sleep_on",
        ],
    ),
    "cannot send its result": (unpicklable, {}, ["rank 1 of 2 raised", " local object"]),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", FAILURES)
def test_a_failure_of_rank_1_is_told_soon_and_leaves_nothing(name: str, pool: Pool) -> None:
    function, options, texts = FAILURES[name]
    before = pool.run(process_id)
    start = time.monotonic()
    with pytest.raises(WorkerError) as failure:
        pool.run(function, 1, **options)
    assert time.monotonic() - start < 10
    assert [text for text in texts if text not in str(failure.value)] == []
    assert set(pool.run(process_id)).isdisjoint(before)
    assert pool.run(rank_times, Scaled(2)) == [Scaled(0), Scaled(2)]


def leave_threads(count: int) -> int:
    for _ in range(count):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    return os.getpid()


def test_workers_in_which_many_threads_are_left_are_replaced(pool: Pool) -> None:
    first = pool.run(leave_threads, 1)
    assert pool.run(leave_threads, MAX_THREADS) == first
    assert set(pool.run(leave_threads, 0)).isdisjoint(first)


def state(pid: int) -> str:
    """The letter that Linux gives the state of a process: T is stopped."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


@pytest.mark.skipif(sys.platform != "linux", reason="workers are stopped on Linux alone")
def test_workers_are_stopped_between_calls(pool: Pool) -> None:
    workers = pool.run(process_id)
    end = time.monotonic() + 20
    while {*map(state, workers)} != {"T"} and time.monotonic() < end:
        time.sleep(0.01)
    assert {*map(state, workers)} == {"T"}
    assert pool.run(process_id) == workers

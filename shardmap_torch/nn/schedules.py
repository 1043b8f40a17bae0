"""Schedules of a pipeline, as data: the microbatch of each rank in each tick."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

from shardmap_torch.errors import LayerError, listing

Row: TypeAlias = tuple[int | None, ...]
"""The microbatch of each rank in one tick; None where a rank has nothing to do."""


@dataclass(frozen=True)
class Tick:
    """The work of all ranks between two messages: forward, then backward."""

    forward: Row
    backward: Row


Schedule: TypeAlias = tuple[Tick, ...]


def gpipe_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule that runs all microbatches forward, and then all backward.

    Each rank saves the inputs of all m microbatches. It has 2(m + n - 1) ticks, of which each rank
    is idle in 2(n - 1).

    Source: Huang et al. 2019, "GPipe".

    Example:
        >>> [tick.forward for tick in gpipe_schedule(2, 2)]
        [(0, None), (1, 0), (None, 1), (None, None), (None, None), (None, None)]
    """
    phase = num_microbatches + num_ranks - 1
    last = num_ranks - 1
    forward = [
        tuple(_within(t - r, num_microbatches) for r in range(num_ranks)) for t in range(phase)
    ]
    backward = [
        tuple(_within(t - (last - r), num_microbatches) for r in range(num_ranks))
        for t in range(phase)
    ]
    idle: Row = (None,) * num_ranks
    return (*(Tick(row, idle) for row in forward), *(Tick(idle, row) for row in backward))


def one_forward_one_backward_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    """Makes a schedule that runs a microbatch backward as soon as it has reached the last rank.

    Rank r of n saves the inputs of at most 2(n - r) - 1 microbatches, however many there are. It
    has m + 2(n - 1) ticks, in most of which a rank does one forward and one backward.

    Source: Narayanan et al. 2019, "PipeDream" (1F1B), with a flush as in Megatron-LM.

    Example:
        >>> [tick.backward for tick in one_forward_one_backward_schedule(2, 2)]
        [(None, None), (None, 0), (0, 1), (1, None)]
    """
    last = num_ranks - 1
    return tuple(
        Tick(
            tuple(_within(t - r, num_microbatches) for r in range(num_ranks)),
            tuple(_within(t - 2 * last + r, num_microbatches) for r in range(num_ranks)),
        )
        for t in range(num_microbatches + 2 * last)
    )


def _within(microbatch: int, count: int) -> int | None:
    return microbatch if 0 <= microbatch < count else None


def num_saved(schedule: Schedule) -> int:
    """Counts the microbatches whose inputs a rank saves at once, on the rank with the most.

    Example:
        >>> num_saved(gpipe_schedule(2, 8)), num_saved(one_forward_one_backward_schedule(2, 8))
        (8, 3)
    """
    most = 0
    for rank in range(len(schedule[0].forward)):
        saved = 0
        for tick in schedule:
            saved += tick.forward[rank] is not None
            most = max(most, saved)
            saved -= tick.backward[rank] is not None
    return most


def check_schedule(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Requires that every rank runs every microbatch once in each direction, on arrival.

    Raises:
        LayerError: it does not; lists every problem.
    """
    problems: list[str] = []
    for rank in range(num_ranks):
        for direction in ("forward", "backward"):
            done = [m for row in _rows(schedule, direction) if (m := row[rank]) is not None]
            if done != list(range(num_microbatches)):
                problems.append(
                    f"rank {rank} goes {direction} with {done}, not 0 to {num_microbatches - 1}"
                )
    if not problems:
        for rank in range(num_ranks):
            for m in range(num_microbatches):
                problems += _early_or_late(schedule, rank, m, num_ranks)
    if problems:
        raise LayerError(listing("This schedule cannot run:", problems))


def _rows(schedule: Schedule, direction: str) -> Sequence[Row]:
    return [getattr(tick, direction) for tick in schedule]


def _early_or_late(schedule: Schedule, rank: int, m: int, num_ranks: int) -> list[str]:
    def at(direction: str, peer: int) -> int:
        return next(t for t, row in enumerate(_rows(schedule, direction)) if row[peer] == m)

    problems = []
    if rank and at("forward", rank) != at("forward", rank - 1) + 1:
        problems.append(f"rank {rank} goes forward with {m} not one tick after rank {rank - 1}")
    if rank < num_ranks - 1 and at("backward", rank) != at("backward", rank + 1) + 1:
        problems.append(f"rank {rank} goes back with {m} not one tick after rank {rank + 1}")
    if at("backward", rank) < at("forward", rank):
        problems.append(f"rank {rank} goes back with {m} before it has gone forward")
    return problems

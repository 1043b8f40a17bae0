"""Schedules are complete, in time, and save what they say."""

from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch.nn import gpipe_schedule, one_forward_one_backward_schedule
from shardmap_torch.nn.pipeline import Schedule, num_saved


def times(schedule: Schedule, direction: str, rank: int) -> dict[int, int]:
    """The tick in which a rank runs each microbatch."""
    rows = enumerate(getattr(tick, direction)[rank] for tick in schedule)
    ticks = [(m, tick) for tick, m in rows if m is not None]
    assert len(ticks) == len(dict(ticks))
    return dict(ticks)


def can_run(schedule: Schedule, num_ranks: int, num_microbatches: int) -> None:
    """Each rank runs each microbatch once in each direction, in order and on its arrival."""
    forward, backward = (
        [times(schedule, way, rank) for rank in range(num_ranks)] for way in ("forward", "backward")
    )
    for rank in range(num_ranks):
        for m in range(num_microbatches):
            assert backward[rank][m] >= forward[rank][m] == forward[0][m] + rank
            assert backward[rank][m] == backward[0][m] - rank
        for found in (forward[rank], backward[rank]):
            assert list(found) == list(range(num_microbatches))


@given(num_ranks=st.integers(1, 5), num_microbatches=st.integers(1, 7))
def test_both_schedules_can_run_and_save_what_the_literature_says(
    num_ranks: int, num_microbatches: int
) -> None:
    gpipe = gpipe_schedule(num_ranks, num_microbatches)
    can_run(gpipe, num_ranks, num_microbatches)
    assert len(gpipe) == 2 * (num_microbatches + num_ranks - 1)
    assert num_saved(gpipe) == num_microbatches
    mixed = one_forward_one_backward_schedule(num_ranks, num_microbatches)
    can_run(mixed, num_ranks, num_microbatches)
    assert len(mixed) == num_microbatches + 2 * (num_ranks - 1)
    assert num_saved(mixed) == min(num_microbatches, 2 * num_ranks - 1)

"""Schedules are complete, in time, and save what they say."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch import LayerError
from shardmap_torch.nn import gpipe_schedule, one_forward_one_backward_schedule
from shardmap_torch.nn.pipeline import check_schedule, num_saved


@given(num_ranks=st.integers(1, 5), num_microbatches=st.integers(1, 7))
def test_both_schedules_can_run_and_save_what_the_literature_says(
    num_ranks: int, num_microbatches: int
) -> None:
    gpipe = gpipe_schedule(num_ranks, num_microbatches)
    check_schedule(gpipe, num_ranks, num_microbatches)
    assert len(gpipe) == 2 * (num_microbatches + num_ranks - 1)
    assert num_saved(gpipe) == num_microbatches
    mixed = one_forward_one_backward_schedule(num_ranks, num_microbatches)
    check_schedule(mixed, num_ranks, num_microbatches)
    assert len(mixed) == num_microbatches + 2 * (num_ranks - 1)
    assert num_saved(mixed) == min(num_microbatches, 2 * num_ranks - 1)


def test_a_schedule_that_leaves_something_out_is_refused() -> None:
    schedule = gpipe_schedule(2, 2)[:-1]
    with pytest.raises(LayerError) as error:
        check_schedule(schedule, 2, 2)
    assert str(error.value) == (
        "This schedule cannot run:\n  rank 0 goes backward with [0], not 0 to 1"
    )


def test_a_schedule_whose_messages_would_wait_is_refused() -> None:
    ticks = list(gpipe_schedule(2, 1))
    late = [*ticks[:1], replace(ticks[0], forward=(None, None)), *ticks[1:]]
    with pytest.raises(LayerError) as error:
        check_schedule(tuple(late), 2, 1)
    assert str(error.value) == (
        "This schedule cannot run:\n  rank 1 goes forward with 0 not one tick after rank 0"
    )


def test_a_schedule_that_goes_back_first_is_refused() -> None:
    forward, backward = gpipe_schedule(1, 1)
    with pytest.raises(LayerError) as error:
        check_schedule((backward, forward), 1, 1)
    assert str(error.value) == (
        "This schedule cannot run:\n  rank 0 goes back with 0 before it has gone forward"
    )

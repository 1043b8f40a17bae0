"""Ranks that wait for one another for ever are found, and those that may still come are not."""

from collections.abc import Mapping

from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch.control.board import Status, find_deadlock, lacks, read

GROUPS = {"all": (0, 1, 2, 3), "low": (0, 1), "high": (2, 3), "odd": (1, 3)}


def waits(group: str, count: int, **others: int) -> Status:
    counts = {**others, group: count}
    return Status(state="waits", group=group, members=GROUPS[group], counts=counts)


def test_two_ranks_in_different_collectives_wait_for_ever() -> None:
    statuses = {0: waits("low", 1, all=1), 1: waits("all", 2)}
    assert list(find_deadlock(0, statuses)) == [1, 0]
    assert list(find_deadlock(1, statuses)) == [0, 1]


def test_a_rank_that_runs_may_still_come() -> None:
    assert not find_deadlock(0, {0: waits("low", 3), 1: Status(counts={"low": 2})})


def test_a_rank_that_has_begun_the_operation_is_not_waited_for() -> None:
    assert not find_deadlock(0, {0: waits("low", 2), 1: waits("high", 1, low=2)})


def test_a_rank_that_has_exited_is_waited_for_in_vain() -> None:
    statuses = {0: waits("low", 2), 1: Status(state="exited", counts={"low": 1})}
    assert list(find_deadlock(0, statuses)) == [1]


def test_a_rank_that_has_raised_may_come_to_the_next_call() -> None:
    raised = Status(state="raised", call=3)
    waiting = Status(state="waits", call=4, group="low", members=(0, 1), counts={"low": 1})
    assert not find_deadlock(0, {0: waiting, 1: raised})
    assert find_deadlock(0, {0: waiting, 1: Status(state="raised", call=4)})


def test_a_circle_through_others_is_found() -> None:
    statuses = {
        0: waits("low", 1),  # for 1
        1: waits("odd", 1),  # for 3
        3: waits("high", 1, odd=0),  # for 2
        2: waits("all", 1),  # for 0
    }
    assert list(find_deadlock(0, statuses)) == [1, 3, 2, 0]


STANDS = st.builds(
    lambda state, group, counts: Status(
        state=state, group=group, members=GROUPS[group], counts=counts
    ),
    st.sampled_from(["runs", "waits", "waits", "exited"]),
    st.sampled_from(sorted(GROUPS)),
    st.dictionaries(st.sampled_from(sorted(GROUPS)), st.integers(0, 2)),
)


@given(st.fixed_dictionaries({rank: STANDS for rank in range(4)}))
def test_what_is_found_is_what_a_simulation_of_the_waits_finds(
    statuses: Mapping[int, Status],
) -> None:
    """Ranks that run, or wait for nobody, end; so do those that then have all they wait for."""
    ends = {rank for rank, status in statuses.items() if status.state == "runs"}
    while True:
        able = {
            rank
            for rank, status in statuses.items()
            if status.state == "waits"
            and all(
                m in ends or m == rank or not lacks(status, statuses[m]) for m in status.members
            )
        }
        if able <= ends:
            break
        ends |= able
    for rank, status in statuses.items():
        if status.state == "waits":
            assert bool(find_deadlock(rank, statuses)) == (rank not in ends)


@given(STANDS)
def test_a_status_reads_back_as_it_was_written(status: Status) -> None:
    assert read(status.to_json()) == status

"""Names that the ranks of an attempt agree on; tests/faults/test_restarts.py has them restarted."""

import threading
from contextlib import suppress
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import TCPStore

from shardmap_torch.control.start import AGENT_STORE, init_process_group, meet
from shardmap_torch.errors import CommunicationError
from tests.support.golden import told

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)


def met(store: TCPStore, ranks: range, size: int) -> dict[int, str]:
    """The names that these ranks of a group get; without the others they give up, as if killed."""
    names: dict[int, str] = {}
    timeout = MINUTE if len(ranks) == size else SECOND / 2

    def run(rank: int) -> None:
        own = store.clone()  # type: ignore[attr-defined]  # torch has it
        own.set_timeout(timeout)
        with suppress(RuntimeError):
            names[rank] = meet(own, rank, size, timeout)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return names


def new_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, timeout=MINUTE)


def test_all_ranks_of_an_attempt_get_one_name_and_each_attempt_another() -> None:
    store = new_store()
    attempts = [met(store, range(4), 4) for _ in range(3)]
    assert all(set(names) == set(range(4)) for names in attempts)
    assert all(len(set(names.values())) == 1 for names in attempts)
    assert len({names[0] for names in attempts}) == 3


@pytest.mark.parametrize("came", [range(1, 3), range(2)], ids=["rank 0", "the last rank"])
def test_an_attempt_in_which_a_rank_was_killed_leaves_the_next_one_right(came: range) -> None:
    store = new_store()
    first = met(store, came, 3)
    second = met(store, range(3), 3)
    assert len(set(second.values())) == 1
    assert not set(first.values()) & set(second.values())


def test_rank_0_names_the_ranks_that_have_not_come() -> None:
    with pytest.raises(RuntimeError, match=r"nothing was heard from ranks \[1, 2\]"):
        meet(new_store(), 0, 3, SECOND)


def test_an_attempt_whose_ranks_do_not_come_ends_within_the_deadline_and_names_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = new_store()
    for name, value in {
        AGENT_STORE: "True",
        "RANK": "0",
        "WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
    }.items():
        monkeypatch.setenv(name, value)
    with told(CommunicationError):
        init_process_group("gloo", SECOND)

"""Ranks learn whether their numbers are equal, and notice who does not come."""

import errno
import secrets
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._C._distributed_c10d import HashStore

from shardmap_torch.control import exchange as module
from shardmap_torch.control.exchange import NONE, Comparison, Exchange

TIMEOUT = timedelta(seconds=20)
LITTLE = timedelta(milliseconds=1)
Values = tuple[int | None, ...]


@pytest.fixture
def connect() -> Iterator[Callable[[int], list[Exchange]]]:
    """Connects so many ranks, in threads."""
    with ExitStack() as stack:

        def make(size: int) -> list[Exchange]:
            store = HashStore()
            with ThreadPoolExecutor(size) as pool:
                found = list(
                    pool.map(lambda r: Exchange(store, "key", r, size, TIMEOUT), range(size))
                )
            for each in found:
                stack.callback(each.close)
            return found

        yield make


def begin(rank: Exchange, number: int, values: Values, timeout: timedelta = TIMEOUT) -> Comparison:
    pairs = [NONE if value is None else (value, value) for value in values]
    low, high = zip(*pairs, strict=True)
    return Comparison(rank, number, low, high, timeout)


def compare(ranks: list[Exchange], number: int, values: list[Values]) -> list[list[bool]]:
    def one(rank: int) -> list[bool]:
        comparison = begin(ranks[rank], number, values[rank])
        comparison.wait(TIMEOUT)
        assert comparison.is_completed()
        assert comparison.differs or all(comparison.are_equal())
        return comparison.are_equal()

    with ThreadPoolExecutor(len(ranks)) as pool:
        return list(pool.map(one, range(len(ranks))))


@pytest.mark.parametrize("size", [2, 3, 4, 7, 18])
def test_every_rank_learns_which_numbers_are_equal_where_they_are_known(
    size: int, connect: Callable[[int], list[Exchange]]
) -> None:
    ranks, number = connect(size), 0
    one = st.sampled_from([None, 0, 1, 2**61 - 2, -(2**63), 2**63 - 1])

    @settings(max_examples=30, deadline=None)
    @given(st.integers(1, 3).flatmap(lambda n: st.tuples(*[st.tuples(*[one] * n)] * size)))
    def agrees(values: tuple[Values, ...]) -> None:
        nonlocal number
        number += 1
        columns = [set(column) - {None} for column in zip(*values, strict=True)]
        expected = [len(column) <= 1 for column in columns]
        assert compare(ranks, number, list(values)) == [expected] * size

    agrees()


def test_a_wait_goes_on_after_it_has_lost_its_patience(
    connect: Callable[[int], list[Exchange]],
) -> None:
    one, two = connect(2)
    mine = begin(one, 1, (5, 6))
    with pytest.raises(RuntimeError, match=r"^not all ranks have come within 0:00:20$"):
        mine.wait(LITTLE)
    assert not mine.is_completed()
    begin(two, 1, (5, 7))
    mine.wait(TIMEOUT)
    assert mine.are_equal() == [True, False]


def test_a_wait_ends_at_its_deadline(connect: Callable[[int], list[Exchange]]) -> None:
    one, _ = connect(2)
    mine = begin(one, 1, (5, 6), LITTLE)
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^not all ranks have come within 0:00:00.001000$"):
            mine.wait(LITTLE)
    assert mine.is_completed()


def test_a_rank_that_is_gone_or_out_of_step_is_an_error(
    connect: Callable[[int], list[Exchange]],
) -> None:
    one, two = connect(2)
    mine = begin(one, 1, (0, 0))
    begin(two, 4, (0, 0))
    with pytest.raises(RuntimeError, match=r"^rank 1 is at comparison 4, and this rank at 1$"):
        mine.wait(TIMEOUT)
    mine = begin(one, 2, (0, 0))
    two.close()
    with pytest.raises(RuntimeError, match=r"^rank 1 has closed its connection$"):
        mine.wait(TIMEOUT)
    assert mine.is_completed()


def denied(*_: object) -> socket.socket:
    raise PermissionError(errno.EACCES, "no sockets within this host")


@pytest.mark.parametrize("ranks_are", ["on one host", "on two hosts", "kept from it"])
def test_a_connection_without_the_token_is_not_taken_for_a_rank(
    ranks_are: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    strangers: list[socket.socket] = []
    listeners_of = module._listeners

    def listens(host: str, number: int) -> Iterator[socket.socket]:
        for listener in listeners_of(host, number):
            stranger = socket.socket(listener.family)
            stranger.connect(listener.getsockname())
            stranger.sendall(b"GET / HTTP/1.1\r\n\r\n")
            strangers.append(stranger)
            yield listener

    monkeypatch.setattr(module, "_listeners", listens)
    monkeypatch.setattr(module, "_HELLO", 0.2)  # so long each stranger is waited for
    hosts = iter([secrets.token_hex(8) for _ in range(2)])
    if ranks_are == "on two hosts":
        monkeypatch.setattr(module, "_host", lambda: next(hosts))
    if ranks_are == "kept from it":
        monkeypatch.setattr(module, "_within", denied)
    store: Any = HashStore()
    with ThreadPoolExecutor(2) as pool:
        ranks = list(pool.map(lambda r: Exchange(store, "key", r, 2, TIMEOUT), range(2)))
    families = {link.family for rank in ranks for link in rank.rank_of}
    is_one_host = ranks_are == "on one host" and sys.platform == "linux"
    assert families == {socket.AF_UNIX if is_one_host else socket.AF_INET}
    assert compare(ranks, 1, [(1, 2), (1, 2)]) == [[True, True]] * 2
    for each in ranks:
        each.close()
    for stranger in strangers:
        stranger.close()


def test_a_rank_that_does_not_come_is_an_error_in_time() -> None:
    with pytest.raises(RuntimeError):
        Exchange(HashStore(), "key", 0, 2, timedelta(milliseconds=50))


def test_the_interface_that_gloo_is_told_to_use_is_listened_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo,eth0")
    assert next(iter(module._addresses())) == "127.0.0.1"
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "no-such-one")
    with module._to_hosts(8) as listener:
        assert listener.getsockname()[1] > 0


@pytest.mark.parametrize("own", [TimeoutError("the user's"), OSError(errno.EAGAIN, "the user's")])
def test_an_error_of_a_signal_handler_is_not_taken_for_lost_patience(
    connect: Callable[[int], list[Exchange]], own: OSError
) -> None:
    def raise_own(*_: object) -> None:
        raise own

    one, _ = connect(2)
    mine = begin(one, 1, (5, 6))
    before = signal.signal(signal.SIGALRM, raise_own)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        with pytest.raises(type(own), match="the user's"):
            mine.wait(TIMEOUT)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert not mine.is_completed()

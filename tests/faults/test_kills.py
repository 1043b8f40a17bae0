"""Processes, and the host of the store, are killed or frozen: an error in time, never a hang."""

import os
import signal
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any
from unittest import mock

import pytest
import torch

from shardmap_torch import (
    I,
    Mesh,
    P,
    ShardMapError,
    all_gather,
    all_reduce,
    make_mesh,
    reduce_scatter,
    shard_map,
)
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.control.recorder import VARIABLE, dump_folder, read_dump
from shardmap_torch.postmortem import compare
from tests.faults.support.world import TIMEOUT, World

ODD = 2
X = torch.arange(32.0).reshape(8, 4)
Strike = Callable[[], None]
End = tuple[str, str, float]


def add(mesh: Mesh, strike: Strike | None = None) -> Any:
    """A function of two collectives; `strike` comes between them."""

    def body(x: torch.Tensor) -> torch.Tensor:
        y = all_reduce(x.sum(0), mesh.axis_names, dst=I)
        if strike is not None:
            strike()
        return y + all_reduce(x.mean(0), mesh.axis_names, dst=I)

    return shard_map(body, mesh=mesh, in_specs=P(mesh.axis_names), out_specs=P())


def before_a_mesh(strike: Strike) -> None:
    make_mesh((4,), ("tp",))
    strike()
    make_mesh((2, 2), ("dp", "tp"))


def before_the_first_check(strike: Strike) -> None:
    f = add(make_mesh((4,), ("tp",)))
    f(X)  # the first check of all imports the rules
    strike()
    f(X[:, :2])


def before_a_known_call(strike: Strike) -> None:
    f = add(make_mesh((2, 2), ("dp", "tp")))
    f(X)
    strike()
    f(X)


def between_collectives(strike: Strike) -> None:
    struck: list[Strike] = []

    def once() -> None:
        for each in struck:
            each()

    f = add(make_mesh((4,), ("tp",)), once)
    f(X)
    struck.append(strike)
    f(X)


def with_messages_on_their_way(strike: Strike) -> None:
    def body(x: torch.Tensor) -> torch.Tensor:
        far = all_gather(x, "tp", tiled=False, dst=I).sum(0)
        return far + all_reduce(x @ x.mT @ x, "tp", dst=I)

    f = shard_map(body, mesh=make_mesh((4,), ("tp",)), in_specs=P("tp"), out_specs=P(), replay=True)
    for _ in range(2):
        f(X)
    start = ProcessGroupBackend._start

    def struck(*args: Any) -> Any:
        found = start(*args)
        if found is not None:
            strike()
        return found

    with mock.patch.object(ProcessGroupBackend, "_start", struck):
        f(X)


def before_a_reduce_scatter(strike: Strike) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"))

    def body(x: torch.Tensor) -> torch.Tensor:
        return reduce_scatter(x, "tp")

    f = shard_map(body, mesh=mesh, in_specs=P(partial={"tp"}), out_specs=P("tp"))
    f(X)
    strike()
    f(X)


def before_a_backward(strike: Strike) -> None:
    f = add(make_mesh((4,), ("tp",)))
    f(X)
    y = f(X.clone().requires_grad_())
    strike()
    y.sum().backward()
    f(X)


def before_recovery(strike: Strike) -> None:
    mesh = make_mesh((2, 2), ("dp", "tp"))
    add(mesh)(X)
    strike()
    mesh.recover()


MOMENTS: Mapping[str, Callable[[Strike], None]] = {
    moment.__name__.replace("_", " "): moment
    for moment in (
        before_a_mesh,
        before_the_first_check,
        before_a_known_call,
        between_collectives,
        with_messages_on_their_way,
        before_a_reduce_scatter,
        before_a_backward,
        before_recovery,
    )
}


NEED_STORE = ("before a mesh", "before recovery")  # new groups do, calls do not


def run(rank: int, moment: str, victim: int | str, number: int, store: int) -> End:
    """Returns how a rank ends that goes on after another one, or the store, has been struck."""
    began = [time.monotonic()]

    def strike() -> None:
        if victim == "store":
            if rank == 0:
                with suppress(ProcessLookupError):
                    os.kill(store, number)
            time.sleep(0.5)
        elif rank == victim:
            os.kill(os.getpid(), number)
        began[0] = time.monotonic()

    try:
        MOMENTS[moment](strike)
    except ShardMapError as error:
        return type(error).__name__, str(error), time.monotonic() - began[0]
    except Exception as error:
        return f"raw {type(error).__name__}", str(error), time.monotonic() - began[0]
    return "returned", "", time.monotonic() - began[0]


def outcomes(moment: str, victim: int | str, number: signal.Signals) -> list[End]:
    """Those of all ranks but the victim."""
    world = World(4)
    try:
        assert world.host.pid is not None
        world.start(run, moment, victim, int(number), world.host.pid)
        without = [victim] if isinstance(victim, int) else []
        # The start of four processes, which are not yet in any wait, does not count.
        found = world.outcomes(40 + 2 * TIMEOUT + 5, without)
        return [o.value or (o.end, o.text, o.seconds) for r, o in enumerate(found) if r != victim]
    finally:
        world.close()


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
@pytest.mark.parametrize("victim", [0, ODD, 3])
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_rank_that_is_killed_or_frozen_is_an_error_in_time_on_the_others(
    moment: str, victim: int, number: signal.Signals
) -> None:
    limit = (2 if moment == "before recovery" else 1) * TIMEOUT + 5
    for kind, text, seconds in outcomes(moment, victim, number):
        assert kind in ("CommunicationError", "CollectiveMismatchError"), text
        assert f"rank {victim}" in text or f"{victim}" in text.split("missing: ", 1)[-1], text
        assert seconds < limit
        assert ".py:" in text or moment == "before recovery", text


@pytest.mark.faults
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP], ids=lambda n: n.name)
@pytest.mark.parametrize("moment", list(MOMENTS))
def test_a_store_that_is_killed_or_frozen_holds_no_rank_for_longer_than_the_deadline(
    moment: str, number: signal.Signals
) -> None:
    for kind, text, seconds in outcomes(moment, "store", number):
        assert kind != "hangs", text
        assert kind == "returned" or (kind == "CommunicationError" and moment in NEED_STORE), text
        assert seconds < 2 * TIMEOUT + 5


def fail_with_a_dump(rank: int, folder: str) -> str:
    os.environ[VARIABLE] = folder
    mesh = make_mesh((2,), ("tp",))
    f = add(mesh)
    f(X)
    if rank == 1:
        raise ValueError("the data is bad")
    try:
        f(X)
    except ShardMapError as error:
        return str(error)
    return "returned"


@pytest.mark.faults
def test_the_dump_of_a_failure_names_the_last_collectives(tmp_path: Any) -> None:
    world = World(2)
    try:
        world.start(fail_with_a_dump, str(tmp_path))
        (first, _) = world.outcomes(60)
    finally:
        world.close()
    told = first.value or str(first)
    assert "rank 1" in told
    assert str(tmp_path) in told
    dump = read_dump(tmp_path / "rank-00000.json")
    sums = [entry for entry in dump.entries if entry.operation.startswith("all_reduce('tp', ")]
    assert len(sums) == 2
    assert all(entry.line.startswith("test_kills.py:") for entry in sums)
    assert compare([dump]).startswith("rank 0: 2 collectives")
    assert dump_folder() != tmp_path

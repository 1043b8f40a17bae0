"""A body that starts threads is told what they may not do."""

import contextlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import CollectiveError, I, P, TransformError, all_reduce, make_mesh, shard_map
from shardmap_torch.backends import threads
from tests.support.golden import told


def on_a_thread(work: Callable[[], Any]) -> Any:
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, name="helper")
    thread.start()
    thread.join()
    if isinstance(found[0], BaseException):
        raise found[0]
    return found[0]


def test_a_collective_on_a_thread_of_the_body_is_refused() -> None:
    mesh = make_mesh((2,), ("tp",), kind="simulated")

    def body(x: Tensor) -> Any:
        total = x.sum()
        return on_a_thread(lambda: all_reduce(total, "tp", dst=I))

    f = shard_map(body, mesh=mesh, in_specs=P("tp"), out_specs=P())
    with told(CollectiveError):
        f(torch.ones(4))


def test_a_gradient_on_a_thread_of_the_body_is_refused() -> None:
    def body(x: Tensor, w: Tensor) -> Any:
        loss = all_reduce((x @ w).square().sum(), "tp", dst=I)
        return on_a_thread(lambda: torch.autograd.grad(loss, w)[0])

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    f = shard_map(body, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
    with pytest.raises(TransformError, match="runs on the thread 'helper' that the body has"):
        f(torch.randn(4, 8), torch.randn(8, 4, requires_grad=True))


@pytest.mark.parametrize("strictness", [True, "global"])
def test_what_a_thread_does_is_refused_where_its_error_is_lost(strictness: Any) -> None:
    def body(x: Tensor) -> Tensor:
        found = [1.0]

        with contextlib.suppress(Exception):
            on_a_thread(lambda: found.insert(0, 3.0 if x.sum() > 0 else 5.0))
        return all_reduce(found[0] * x.sum(), "tp", dst=I)

    def writing(x: Tensor) -> Tensor:
        y = x.clone()
        with contextlib.suppress(Exception):
            on_a_thread(lambda: y.mul_(len(x)))
        return all_reduce(y.sum(), "tp", dst=I)

    mesh = make_mesh((2,), ("tp",), kind="simulated")
    for each in (body, writing):
        f = shard_map(each, mesh=mesh, in_specs=P("tp"), out_specs=P(), check=strictness)
        with pytest.raises(TransformError, match="runs on the thread 'helper' that the body has"):
            f(torch.ones(4))


def test_rank_threads_end_where_their_start_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    mesh = make_mesh((4,), ("tp",), kind="simulated", simulate="ranks")
    f = shard_map(
        lambda x: all_reduce(x.sum(), "tp", dst=I), mesh=mesh, in_specs=P("tp"), out_specs=P()
    )
    f(torch.ones(8))
    started: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            if len(started) == 3:
                raise KeyboardInterrupt
            super().start()
            started.append(self)

    with monkeypatch.context() as patch:
        patch.setattr(threads.threading, "Thread", Interrupted)  # type: ignore[attr-defined]
        with pytest.raises(KeyboardInterrupt):
            f(torch.ones(8))
    for thread in started:
        thread.join(10)
    assert len(started) == 3
    assert not any(thread.is_alive() for thread in started)
    assert f(torch.ones(8)) == 8

"""Persistent gloo worker processes, so that a distributed test costs milliseconds, not start-up.

A `Pool` is a world of `size` processes, forked from a server that has imported torch already.
`pool.run(fn, *args)` calls `fn(*args)` on every rank and returns the results in rank order. `fn`
is a top-level function of a test module; arguments and results are pickled. Workers that raised,
died or hung are thrown away, and the next call starts fresh ones. Between calls the workers are
stopped: verdicts keep meshes alive, and each gloo group has a thread that wakes up a hundred times
a second. Six folders of tests took 87 s so, and 104 s without.
"""

import ctypes
import faulthandler
import gc
import multiprocessing
import os
import pickle
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, Literal, TypeVar, overload
from unittest import mock

import torch
import torch.distributed as dist

from shardmap_torch.checker.verify import repairing

T = TypeVar("T")

START_TIMEOUT = 120.0  # Seconds; the first worker waits for the server to import torch.
RUN_TIMEOUT = 30.0
# Below RUN_TIMEOUT: a collective that nobody joins then raises, with the line that called it.
GLOO_TIMEOUT = timedelta(seconds=20)
# Threads of a worker beyond which the next call starts fresh ones: three for each gloo group.
MAX_THREADS = 100
# Elsewhere workers that are stopped would outlive a session that is killed.
PAUSES = sys.platform == "linux"
# How long the other ranks may go on after one has failed: they may be waiting for it in vain.
GRACE = 3.0

_CONTEXT = multiprocessing.get_context("forkserver")
_CONTEXT.set_forkserver_preload(
    [
        # Each worker would take half a second to import the last three.
        *("torch._dynamo", "hypothesis", "pytest", "shardmap_torch.parallel"),
        *("shardmap_torch.run.process_group", "shardmap_torch.checker.spmd.equivalence"),
    ]
)


@dataclass(frozen=True)
class Raised:
    """An exception that one rank raised: its type's name, its text, its traceback as printed."""

    kind: str
    text: str
    trace: str

    def __str__(self) -> str:
        return f"raised\n{self.trace.rstrip()}"


class WorkerError(Exception):
    """An error that describes what every rank of a failed run did, with traceback and output."""


class Pool:
    """A world of `size` gloo processes on this host."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._workers: list[_Worker] = []
        self._folder: Path | None = None

    @overload
    def run(
        self,
        fn: Callable[..., T],
        *args: Any,
        timeout: float = RUN_TIMEOUT,
        expect_error: Literal[False] = False,
    ) -> list[T]: ...

    @overload
    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = RUN_TIMEOUT,
        expect_error: Literal[True],
    ) -> list[Raised]: ...

    def run(
        self,
        fn: Callable[..., Any],
        *args: Any,
        timeout: float = RUN_TIMEOUT,
        expect_error: bool = False,
    ) -> list[Any]:
        """Calls `fn(*args)` on every rank under the caller's warning filters.

        Tries as many repairs of rejected programs as the caller. Returns the results in rank
        order, or with `expect_error` the exceptions, of which every rank must then raise one.
        Raises WorkerError if a rank does otherwise, dies, or has not answered after `timeout`
        seconds.
        """
        request = pickle.dumps((fn, args, list(warnings.filters), repairing._TRIES))
        self._start()
        try:
            for worker in self._workers:
                worker.send(request)
            replies = self._collect(time.monotonic() + timeout)
            wanted = Raised if expect_error else _Returned
            if not all(isinstance(reply, wanted) for reply in replies):
                raise WorkerError(self._describe(replies))
        except BaseException:  # A signal too: answers to this call must not meet the next one.
            self.close()
            raise
        if expect_error:
            self.close()  # The ranks may have stopped at different collectives.
            return replies
        if PAUSES:
            for worker in self._workers:
                worker.pause()
        return [reply.value for reply in replies if isinstance(reply, _Returned)]

    def close(self) -> None:
        """Kills the workers; the next `run` starts fresh ones."""
        for worker in self._workers:
            worker.kill()
        self._workers = []
        if self._folder is not None:
            shutil.rmtree(self._folder)
            self._folder = None

    def _start(self) -> None:
        if self._workers and self._workers[0].num_threads <= MAX_THREADS:
            for worker in self._workers:
                worker.resume()
            return
        self.close()
        self._folder = Path(tempfile.mkdtemp(prefix="gloo-pool-"))
        try:
            for rank in range(self.size):
                self._workers.append(_Worker(rank, self.size, self._folder))
            replies = self._collect(time.monotonic() + START_TIMEOUT)
            if not all(isinstance(reply, _Returned) for reply in replies):
                raise WorkerError("Workers did not start.\n" + self._describe(replies))
        except BaseException:
            self.close()
            raise

    def _collect(self, deadline: float) -> list["_Reply"]:
        """Waits for one reply a rank until `deadline`, or until GRACE after the first failure."""
        pending = {worker.connection: worker for worker in self._workers}
        replies: list[_Reply] = [_Silent()] * self.size
        while pending and (ready := wait(list(pending), max(0.0, deadline - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                worker = pending.pop(connection)
                replies[worker.rank] = reply = worker.receive()
                if not isinstance(reply, _Returned):
                    deadline = min(deadline, time.monotonic() + GRACE)
        for worker in pending.values():
            worker.print_stack()
        return replies

    def _describe(self, replies: list["_Reply"]) -> str:
        lines = []
        for worker, reply in zip(self._workers, replies, strict=True):
            lines.append(f"rank {worker.rank} of {self.size} {reply}")
            if output := worker.output():
                lines.append(f"--- output of rank {worker.rank} ---\n{output.rstrip()}")
        return "\n".join(lines)


def run_alone(fn: Callable[[], T], timeout: float = RUN_TIMEOUT) -> T:
    """Calls `fn()` in a process of its own, without a process group; returns its result."""
    connection, remote = _CONTEXT.Pipe()
    process = _CONTEXT.Process(
        target=_answer, args=(remote, pickle.dumps((fn, (), [], repairing._TRIES)))
    )
    process.start()
    remote.close()
    try:
        assert connection.poll(START_TIMEOUT + timeout), "no answer in time"
        reply = pickle.loads(connection.recv_bytes())
    finally:
        process.kill()
        process.join()
        connection.close()
    if isinstance(reply, Raised):
        raise WorkerError(str(reply))
    value: T = reply.value
    return value


def _answer(connection: Connection, request: bytes) -> None:
    gc.freeze()
    torch.set_num_threads(1)
    connection.send_bytes(_call(request))


Gloo = Callable[[int], Pool]  # The fixture `gloo`: the session's pool of that size.


@dataclass(frozen=True)
class _Returned:
    value: Any

    def __str__(self) -> str:
        return "returned normally"


@dataclass(frozen=True)
class _Died:
    exit_code: int | None

    def __str__(self) -> str:
        return f"died with exit code {self.exit_code}"


@dataclass(frozen=True)
class _Silent:
    def __str__(self) -> str:
        return "did not answer in time; its stack is in its output"


_Reply = _Returned | Raised | _Died | _Silent


class _Worker:
    """The parent's end of one worker process."""

    def __init__(self, rank: int, size: int, folder: Path) -> None:
        self.rank = rank
        self._captured = folder / f"rank{rank}.txt"
        self._captured.touch()
        self.connection, remote = _CONTEXT.Pipe()
        self._process = _CONTEXT.Process(
            target=_serve, args=(remote, rank, size, folder / "store", self._captured), daemon=True
        )
        self._process.start()
        remote.close()

    @property
    def num_threads(self) -> int:
        """Counts the threads of the worker; 0 if it has died, or where there is no /proc."""
        try:
            return len(os.listdir(f"/proc/{self._process.pid}/task"))
        except OSError:
            return 0

    def send(self, request: bytes) -> None:
        os.truncate(self._captured, 0)
        with suppress(BrokenPipeError):  # It died while idle, which `receive` reports.
            self.connection.send_bytes(request)

    def receive(self) -> _Reply:
        try:
            reply = self.connection.recv_bytes()
        except (EOFError, ConnectionResetError):
            self._process.join(GRACE)
            return _Died(self._process.exitcode)
        loaded: _Reply = pickle.loads(reply)
        return loaded

    def output(self) -> str:
        return self._captured.read_text(errors="replace")

    def print_stack(self) -> None:
        """Makes a worker that hangs write its Python stack to its output."""
        self._signal(signal.SIGUSR1)
        time.sleep(0.1)

    def pause(self) -> None:
        """Takes all processor time from the worker."""
        self._signal(signal.SIGSTOP)

    def resume(self) -> None:
        """Lets the worker go on."""
        self._signal(signal.SIGCONT)

    def _signal(self, number: signal.Signals) -> None:
        if self._process.pid is not None and self._process.is_alive():
            os.kill(self._process.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.join()
        self.connection.close()


def _serve(connection: Connection, rank: int, size: int, store: Path, captured: Path) -> None:
    """A worker's life: join the world, then answer calls until the parent closes or dies."""
    gc.freeze()  # A collection would write to, and so copy, all memory shared with the server.
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, which kills us.
    if PAUSES:
        _die_with_the_session()
    sys.stdout = sys.stderr = captured.open("a", buffering=1)
    os.dup2(sys.stdout.fileno(), 1)
    os.dup2(sys.stdout.fileno(), 2)
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{store}",
        rank=rank,
        world_size=size,
        timeout=GLOO_TIMEOUT,
    )
    connection.send_bytes(pickle.dumps(_Returned(None)))
    while True:
        try:
            request = connection.recv_bytes()
        except EOFError:
            return
        _reset()
        reply = _call(request)
        sys.stdout.flush()
        connection.send_bytes(reply)


def _die_with_the_session() -> None:
    """Has the kernel kill this worker when its server has gone, even while it is stopped."""
    # Through this pipe each worker would keep the server alive, which ends with the session else.
    alive: int = forkserver._forkserver._forkserver_alive_fd  # type: ignore[attr-defined]
    os.close(alive)
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _call(request: bytes) -> bytes:
    """The pickled result of a pickled call, or the pickled error it ended in."""
    try:
        fn, args, filters, tries = pickle.loads(request)
        with warnings.catch_warnings(), mock.patch.object(repairing, "_TRIES", tries):
            warnings.filters = filters
            return pickle.dumps(_Returned(fn(*args)))
    except BaseException as error:  # pytest.fail and SystemExit too must reach the parent.
        return pickle.dumps(Raised(type(error).__name__, str(error), traceback.format_exc()))


def _reset() -> None:
    """Gives each call the same start. Whatever else a call may leave behind is undone here."""
    torch.manual_seed(0)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)

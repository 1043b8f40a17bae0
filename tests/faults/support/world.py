"""A world of gloo processes that may be killed and frozen; its store is in another process."""

import multiprocessing as mp
import os
import signal
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.support.pool import _CONTEXT as CONTEXT

TIMEOUT = 6.0  # seconds: the deadline of every wait
START = 90.0


@dataclass(frozen=True)
class Outcome:
    """Fate of one rank: how it ended, its error or result, and after how long."""

    end: str
    kind: str
    text: str
    seconds: float
    value: Any = None

    def __str__(self) -> str:
        return f"{self.end} {self.kind} after {self.seconds:.1f} s: {self.text}"


class World:
    """`size` processes that run one function, and the process that hosts their store."""

    def __init__(self, size: int, timeout: float = TIMEOUT) -> None:
        self.size, self.timeout = size, timeout
        parent, child = CONTEXT.Pipe()
        self.host = CONTEXT.Process(target=_host, args=(child,), daemon=True)
        self.host.start()
        self.port: int = parent.recv()
        self.processes: list[mp.process.BaseProcess] = []
        self._connections: list[Connection] = []

    def start(self, function: Callable[..., Any], *args: Any) -> None:
        """Starts `function(rank, *args)` on every rank."""
        for rank in range(self.size):
            parent, child = CONTEXT.Pipe()
            settings = (rank, self.size, self.port, self.timeout)
            process = CONTEXT.Process(
                target=_worker, args=(child, settings, function, args), daemon=True
            )
            process.start()
            child.close()
            self.processes.append(process)
            self._connections.append(parent)

    def signal(self, who: int | str, number: signal.Signals) -> None:
        """Sends a signal to a rank, or to the host of the store."""
        pid = (self.host if who == "store" else self.processes[int(who)]).pid
        assert pid is not None
        with suppress(ProcessLookupError):
            os.kill(pid, number)

    def outcomes(self, seconds: float, without: Sequence[int] = ()) -> list[Outcome]:
        """Waits for all ranks but `without`; those that are late hang."""
        end, began = time.monotonic() + seconds, time.monotonic()
        found: list[Outcome] = [Outcome("hangs", "", "", seconds)] * self.size
        pending = {
            self._connections[rank]: rank for rank in range(self.size) if rank not in without
        }
        while pending and (ready := wait(list(pending), max(0.0, end - time.monotonic()))):
            for connection in ready:
                assert isinstance(connection, Connection)
                rank = pending.pop(connection)
                try:
                    found[rank] = connection.recv()
                except (EOFError, ConnectionResetError):
                    self.processes[rank].join(2)
                    code = self.processes[rank].exitcode
                    after = time.monotonic() - began
                    found[rank] = Outcome("died", f"exit code {code}", "", after)
        return found

    def close(self) -> None:
        """Kills all."""
        for process in [*self.processes, self.host]:
            process.kill()
            process.join()


def _host(connection: Connection) -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    connection.send(store.port)
    with suppress(EOFError):
        connection.recv()
    while True:
        time.sleep(60)


def _worker(
    connection: Connection,
    settings: tuple[int, int, int, float],
    function: Callable[..., Any],
    args: tuple[Any, ...],
) -> None:
    rank, size, port, timeout = settings
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 1)
    os.dup2(null, 2)
    torch.set_num_threads(1)
    store = TCPStore("127.0.0.1", port, is_master=False, timeout=timedelta(seconds=START))
    dist.init_process_group(
        "gloo", store=store, rank=rank, world_size=size, timeout=timedelta(seconds=timeout)
    )
    store.set_timeout(timedelta(seconds=timeout))
    began = time.monotonic()
    try:
        value = function(rank, *args)
        outcome = Outcome("returned", "", "", time.monotonic() - began, value)
    except Exception as error:
        text = str(error) or "".join(traceback.format_tb(error.__traceback__))
        outcome = Outcome("raised", type(error).__name__, text, time.monotonic() - began)
    connection.send(outcome)
    os._exit(0)

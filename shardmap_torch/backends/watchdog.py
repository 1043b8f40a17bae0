"""Waiting for other processes, without waiting for one that will never come; see `vote`.

gloo lets a wait for a collective be given up and taken up again. A wait for one peer it does not:
what ends that early ends the connection. So it is ended, by another thread, only when the program
is lost anyway.
"""

import atexit
import threading
from contextlib import suppress
from datetime import timedelta
from typing import Final

import torch.distributed as dist

from shardmap_torch.backends.consensus import PATIENCE, Place, here, is_overtaken


class OvertakenError(Exception):
    """Those whom this process waits for have left the program that the wait is part of."""


def wait_for_all(work: dist.Work) -> None:
    """Waits for a collective on gloo.

    Raises:
        OvertakenError: a vote is on that this process can never reach.
    """
    while True:
        try:
            work.wait(PATIENCE)
            return
        except RuntimeError:
            if work.is_completed():  # it has failed; what has not may be waited for again
                raise
        if is_overtaken(here()):
            raise OvertakenError


class _Lookout:
    """A thread that looks for a vote while this process waits for a peer."""

    def __init__(self) -> None:
        self._thread: threading.Thread | None = None
        self._waiting: tuple[dist.Work, Place] | None = None
        self._ended: dist.Work | None = None
        self._leaving = threading.Event()

    def wait(self, work: dist.Work) -> None:
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
            self._thread.start()
            # An interpreter that ends aborts, if a thread then comes back from torch's C++.
            atexit.register(self._leave, self._thread)
        self._waiting = work, here()
        try:
            work.wait()
        except RuntimeError:
            if self._ended is work:
                raise OvertakenError from None
            raise
        finally:
            self._waiting = None

    def _look(self) -> None:
        with suppress(Exception):  # no process group any more: nobody waits
            while not self._leaving.wait(PATIENCE.total_seconds()):
                waiting = self._waiting
                if waiting is not None and is_overtaken(waiting[1]):
                    self._ended = waiting[0]
                    with suppress(RuntimeError):
                        waiting[0].wait(timedelta(milliseconds=1))

    def _leave(self, thread: threading.Thread) -> None:
        self._leaving.set()
        thread.join()


_LOOKOUT: Final = _Lookout()


def wait_for_peer(work: dist.Work) -> None:
    """Waits for a message from or to one process on gloo.

    Raises:
        OvertakenError: as `wait_for_all`.
    """
    _LOOKOUT.wait(work)

"""PeerWatch: waits on gloo for a message from or to one process, and ends waits that are stuck.

gloo can time out of a wait for a collective and resume it. A wait for one peer it cannot: a timeout
closes the connection. So another thread ends it, and only when the peer can never arrive.
"""

import threading
from contextlib import suppress
from datetime import timedelta

import torch.distributed as dist

from shardmap_torch.control.deadlock import PATIENCE
from shardmap_torch.control.waiting import StuckError, Waiting


class PeerWatch:
    """A thread that checks if a wait for a peer can end, while this process waits."""

    def __init__(self, waiting: Waiting) -> None:
        """Keeps what checks the waits; the first wait starts the thread."""
        self._rank_waits = waiting
        self._thread: threading.Thread | None = None
        self._waiting: dist.Work | None = None
        self._ended: tuple[dist.Work, StuckError] | None = None
        self._leaving = threading.Event()

    def wait(self, work: dist.Work) -> None:
        """Waits for a transfer.

        Raises:
            StuckError: the peer can never arrive.
            RuntimeError: the transfer has failed, or taken longer than the group's timeout.
        """
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="peer watch", daemon=True)
            self._thread.start()
        self._waiting = work
        try:
            work.wait()
        except RuntimeError:
            if self._ended is not None and self._ended[0] is work:
                raise self._ended[1] from None
            raise
        finally:
            self._waiting = None
        if self._rank_waits.is_blocked:
            self._rank_waits.unblock()

    def _look(self) -> None:
        before: dist.Work | None = None
        while not self._leaving.wait(PATIENCE.total_seconds()):
            work = self._waiting
            if work is not None and work is before:
                try:
                    self._rank_waits.look_out()
                except StuckError as error:
                    self._ended = work, error
                    with suppress(RuntimeError):
                        work.wait(timedelta(milliseconds=1))
            before = work

    def close(self) -> None:
        """Ends the thread."""
        self._leaving.set()
        if self._thread is not None:
            self._thread.join(PATIENCE.total_seconds())

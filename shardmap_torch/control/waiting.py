"""Waits of this rank for others: what it posts meanwhile, and what ends them.

A wait ends once one of the ranks that it needs can never arrive, or at a deadline.
"""

import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any, Final, TypeVar

import torch.distributed as dist

from shardmap_torch.control.board import (
    CHECK,
    PATIENCE,
    Board,
    RankGroup,
    Report,
    State,
    Status,
    find_deadlock,
    lacks,
)
from shardmap_torch.control.exchange import Comparison
from shardmap_torch.control.messages import OF_TORCH, by_ranks
from shardmap_torch.control.recorder import FlightRecorder, History
from shardmap_torch.core.source_location import call_site, standing, warn_at
from shardmap_torch.errors import CommunicationError

T = TypeVar("T")


def within(
    limit: timedelta | None, what: str, make: Callable[[], T], *, on_thread: bool = True
) -> T:
    """Runs a function that may block in torch's store, for a limited time.

    It runs on a thread of its own, unless it needs the state of this one, as its CUDA device: then
    its own deadline ends it.

    Raises:
        CommunicationError: it has not ended in time: the store is frozen or unreachable, or a rank
            has not called it.
    """
    done: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            done.append(make())
        except BaseException as error:  # raised where the caller waits
            errors.append(error)

    if on_thread:
        thread = threading.Thread(target=run, name=f"shardmap {what}", daemon=True)
        thread.start()
        thread.join(None if limit is None else limit.total_seconds() + 1)
    else:
        run()
    if errors and not isinstance(errors[0], RuntimeError):
        raise errors[0]
    if not done:
        why = f"{errors[0]}".splitlines()[0] if errors else "the store or a rank does not answer"
        rank = dist.get_rank() if dist.is_initialized() else os.environ["RANK"]
        raise CommunicationError(
            f"{what} has not ended within {limit} on rank {rank}: {why}. Every process "
            "must make the same meshes in the same order, and the process that hosts the store "
            "must be alive."
        ) from (errors[0] if errors else None)
    return done[0]


_LONG: Final = 20
"""Seconds after which a rank says that others wait where it may not come to."""


class Progress:
    """The progress of this rank, written by the thread that runs the program; another posts it.

    Attributes:
        call: the number of the newest call of a shard_mapped function, and the function's name.
        rank_group: the ranks of its newest operation.
        is_blocked: whether it has posted that it waits in that operation.
        doing: the description of the newest comparison.
        raised: the error of its newest call.
        broken: the error that has left its groups in an unknown state.
        failed: the state of a rank that is broken.
        exited: whether the process ends.
        epoch: number of its recoveries.
        report: its call in a comparison that failed.
        suspect: the ranks that could not arrive when it was last looked.
    """

    def __init__(self, recorder: FlightRecorder, history: History) -> None:
        self._recorder, self._history = recorder, history
        self.call: tuple[int, str] = (0, "")
        self.rank_group = RankGroup()
        self.is_blocked = self.exited = False
        self.doing = self.raised = self.broken = ""
        self.failed: State = "broken"
        self.epoch = 0
        self.report: Report | None = None
        self.suspect: Sequence[Any] = ()
        self._post = self._beat = 0

    def block(self) -> None:
        """Notes that this rank waits for others."""
        self._post += 1
        self.is_blocked = True
        self._recorder.is_open = self.rank_group.name != CHECK

    def unblock(self) -> None:
        """Notes that the wait is over."""
        self.is_blocked, self.suspect = False, ()
        self._recorder.is_open = False

    def restart(self) -> None:
        """Notes that a recovery has begun."""
        self.epoch += 1
        self.broken, self.raised = self.broken or "it calls recover().", ""
        self.unblock()

    def status(self) -> Status:
        """Describes the progress; called on any thread."""
        self._beat += 1
        state, what = self._state()
        return Status(
            state=state,
            call=self.call[0],
            what=what,
            group=self.rank_group.name,
            members=self.rank_group.members if state == "waits" else (),
            counts=self._history.counts(),
            post=self._post,
            beat=self._beat,
            epoch=self.epoch,
            report=self.report,
        )

    def _state(self) -> tuple[State, str]:
        last, (number, function) = self._recorder.last(), self.call
        newest = self._history.newest
        where = f"call {number} of {function}" if number else "its start"
        before = f"; its last collective is {last}" if last is not None else ""
        if self.exited:
            why = f" after it {self.raised}" if self.raised else ""
            state: State = "exited" if why else "ended"
            return state, f"has exited{why}, in or after {where}{before}"
        if self.broken:
            return self.failed, f"has failed before: {self.broken}"
        if self.raised:
            return "raised", f"{self.raised}, in {where}"
        if self.is_blocked and self.rank_group.name == CHECK:
            return "waits", f"waits in the check of {self.doing}{newest}"
        if self.is_blocked:
            return "waits", f"waits in {last}"
        site, is_outside = standing()
        at = "" if site is None else f" at {site}"
        if is_outside:
            return "outside", f"waits in a collective of torch's own{at}, after {where}{before}"
        return "runs", f"runs{at}, in or after {where}{before}"


class StuckError(Exception):
    """The ranks that this one waits for can never arrive."""

    def __init__(self, path: Sequence[int], statuses: Mapping[int, Status]) -> None:
        """Keeps the result and the argument of `find_deadlock`."""
        super().__init__(f"waits for ever for rank {path[0]}")
        self.path, self.statuses = path, statuses

    @property
    def is_disagreement(self) -> bool:
        """Returns whether all ranks are alive, and wait in different operations."""
        return self.statuses[self.path[-1]].state in ("waits", "disagrees")


def is_done(work: dist.Work | Comparison) -> bool:
    """Waits a little for an operation; returns whether it is done.

    Raises:
        RuntimeError: it has failed.
    """
    try:
        work.wait(PATIENCE)
    except RuntimeError as error:
        if is_of_handler(error):
            raise
        if not work.is_completed():
            return False
        work.wait(PATIENCE)  # its own error, unless it was done right after the patience was over
    return True


def is_of_handler(error: BaseException) -> bool:
    """Returns whether a signal handler of the user's has raised it, while torch waited."""
    frame = error.__traceback__
    while frame is not None and frame.tb_next is not None:
        frame = frame.tb_next
    return frame is not None and frame.tb_frame.f_globals.get("__package__") != __package__


class Waiting:
    """The waits of this rank, which it posts, so that others can see who waits for whom."""

    def __init__(self, rank: int, progress: Progress, board: Board) -> None:
        """Posts `progress` to `board`."""
        self._rank, self._progress, self._board = rank, progress, board
        self._num_outside = 0

    def wait(self, work: dist.Work | Comparison) -> None:
        """Waits for an operation on gloo or a comparison, while the ranks that it needs may arrive.

        Raises:
            StuckError: they cannot arrive.
            RuntimeError: the operation has failed, or taken longer than the group's timeout.
        """
        while not is_done(work):
            self.look_out()
        if self._progress.is_blocked:
            self.unblock()

    def wait_on(self, work: dist.Work) -> None:
        """Waits as `wait`, after it has waited for some time already."""
        self.look_out()
        self.wait(work)

    def look_out(self) -> None:
        """Posts that this rank waits, and checks if the wait can end.

        Raises:
            StuckError: it cannot, by two checks in a row: a rank may go on during the first.
        """
        progress = self._progress
        self.block()
        statuses = {**self._board.look(PATIENCE.total_seconds()), self._rank: progress.status()}
        self._warn(statuses)
        path = find_deadlock(self._rank, statuses)
        seen = tuple((r, statuses[r].post, statuses[r].call, statuses[r].state) for r in path)
        if path and seen == progress.suspect:
            raise StuckError(path, statuses)
        progress.suspect = seen

    def _warn(self, statuses: Mapping[int, Status]) -> None:
        """Warns that others may wait for this rank in a collective of torch's own."""
        own = statuses[self._rank]
        outside = {r: s.what for r, s in statuses.items() if s.state == "outside" and lacks(own, s)}
        self._num_outside = (self._num_outside + 1) * bool(outside)
        if self._num_outside == _LONG:
            lines = [f"  {line}" for line in by_ranks({self._rank: own.what, **outside})]
            warned = ["processes may wait for one another for ever:", *lines, OF_TORCH]
            warn_at(call_site(), "\n".join(warned))

    def block(self) -> None:
        """Posts that this rank waits, unless it has."""
        progress = self._progress
        if progress.is_blocked:
            return
        progress.block()
        self._board.touch()

    @property
    def is_blocked(self) -> bool:
        """Returns whether this rank has posted that it waits."""
        return self._progress.is_blocked

    def unblock(self) -> None:
        """Posts that the wait is over."""
        self._progress.unblock()
        self._board.touch()


class PeerWatch:
    """A thread that checks if a wait for a peer can end, while this process waits.

    gloo can time out of a wait for a collective and resume it. A wait for one peer it cannot: a
    timeout closes the connection. So another thread ends it, and only when the peer can never
    arrive.
    """

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

"""Board: the posted progress of all ranks, and the ranks that wait for others for ever.

Each rank posts to the store, and reads what the others have posted. Only a thread of its own talks
to the store: one whose host is frozen or unreachable blocks that thread only, and callers of the
board wait for a limited time.
"""

import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from time import monotonic
from typing import Any, Final, Literal, NamedTuple, TypeAlias

from shardmap_torch.core.torch_private.engine import Store

PATIENCE: Final = timedelta(seconds=1)
"""Time that a rank waits before it posts, and checks if the wait can end."""

State: TypeAlias = Literal[
    "runs", "outside", "waits", "raised", "broken", "disagrees", "exited", "ended"
]


class Value(NamedTuple):
    """A value that must be equal on ranks, as one of them has it.

    Attributes:
        path: names it.
        what: its shape, and the like.
        shard: the shard that it is of a value; empty if it is all.
        bits: a hash of them.
        repair: what to do where they differ.
        site: the line of the call that it is of.
        is_plain: whether it is a plain tensor, and no copy of a DTensor's shard.
    """

    path: str
    what: str
    shard: str
    bits: str
    repair: str
    site: str
    is_plain: bool


class Step(NamedTuple):
    """A comparison, or what is compared with the next, that a rank has come to.

    Attributes:
        check: its number of comparisons then.
        what: names it.
        site: the innermost line of the user's code.
        callers: the lines around that, the innermost first.
    """

    check: int
    what: str
    site: str
    callers: Sequence[str] = ()

    @property
    def lines(self) -> tuple[str, ...]:
        """Tells it from other steps."""
        return self.what, self.site, *self.callers


class Report(NamedTuple):
    """A rank's call in a check that failed: its number, line, text, values and last steps."""

    number: int
    site: str
    text: str
    values: Sequence[Value] = ()
    trail: Sequence[Step] = ()


CHECK: Final = "check"
"""The group of the exchange before each call, of which every rank is a member."""


@dataclass(frozen=True)
class RankGroup:
    """Ranks that do an operation together.

    Attributes:
        name: a name that only these ranks use.
        members: their numbers.
    """

    name: str = ""
    members: tuple[int, ...] = ()


@dataclass(frozen=True)
class Status:
    """The progress of a rank, as it posts it for its peers.

    Attributes:
        state: it runs, runs a collective of torch's own ("outside"), waits for others, has raised
            an error in its newest call, has failed because a rank is gone ("broken") or because
            ranks disagree, has exited after an error, or has ended without one.
        call: the number of its newest call of a shard_mapped function.
        what: its current or last operation, with the line of the user's code.
        group: the name of the group that it waits on.
        members: the ranks of that group.
        counts: number of operations begun on each group.
        post: differs between any two waits of one rank.
        beat: counter that grows while the rank's process is alive.
        epoch: number of its recoveries.
        report: number, line and text of its call in the check that failed, if one did.
    """

    state: State = "runs"
    call: int = 0
    what: str = ""
    group: str = ""
    members: tuple[int, ...] = ()
    counts: Mapping[str, int] = field(default_factory=dict)
    post: int = 0
    beat: int = 0
    epoch: int = 0
    report: Report | None = None

    def to_json(self) -> str:
        """Serialises it for the store; `read` is the inverse."""
        return json.dumps(asdict(self))

    def will_never_join(self, waiting: "Status") -> bool:
        """Returns whether it cannot join the operation of `waiting`: it has left that call."""
        if self.state == "raised":  # and may go on with the next call
            return self.call >= waiting.call
        return self.state in ("broken", "disagrees", "exited", "ended")


def read(text: str) -> Status:
    """Parses the result of `to_json`."""
    raw = json.loads(text)
    raw["members"] = tuple(raw["members"])
    if raw["report"] is not None:
        number, site, text, values, trail = raw["report"]
        found = [Value(*each) for each in values]
        steps = tuple(Step(*each) for each in trail)
        raw["report"] = Report(number, site, text, found, steps)
    return Status(**raw)


def lacks(waiting: Status, other: Status) -> bool:
    """Returns whether `other` has not begun the operation that `waiting` waits in."""
    begun = other.counts.get(waiting.group, 0)
    return begun < waiting.counts.get(waiting.group, 0)


def find_deadlock(rank: int, statuses: Mapping[int, Status]) -> Sequence[int]:
    """Finds ranks that `rank` waits for, directly or through others, and that can never arrive.

    A rank waits for the members of its group that have not begun the operation. It waits for ever
    if one of these has ended, or waits for ever itself: the wait-for graph has a cycle (Knapp 1987,
    the AND model).

    Returns:
        The ranks from the first that `rank` waits for to the one that closes the cycle or has
        ended; empty if all may still arrive.
    """
    done: set[int] = set()

    def search(at: int, path: tuple[int, ...]) -> tuple[int, ...]:
        status = statuses[at]
        for member in status.members if status.state == "waits" else ():
            if member == at or member not in statuses or not lacks(status, statuses[member]):
                continue
            if statuses[member].will_never_join(status) or member in (*path, at):
                return (*path, at, member)
            if member not in done and (found := search(member, (*path, at))):
                return found
        done.add(at)
        return ()

    return search(rank, ())[1:]


BEAT: Final = 1.0
"""Seconds between two posts of a rank."""

_PAUSE: Final = 0.05
_FLUSH: Final = 1.0
"""Seconds that an exiting process takes at most to post that."""


class Board:
    """The posts of all ranks, as this rank knows them."""

    def __init__(
        self, store: Store, rank: int, size: int, status: Callable[[], Status], timeout: timedelta
    ) -> None:
        """Starts the thread; `status` is called on it."""
        self._store, self._rank, self._size, self._status = _own(store, timeout), rank, size, status
        # A store of thousands of ranks is posted to, and read, less often.
        many: Any = self._store
        self._reads_many = bool(many.has_extended_api())
        self._interval = BEAT * max(1.0, size / 512)
        self._seen: dict[int, Status] = {}
        self._changed_at: dict[int, float] = {}
        self._wake = threading.Condition()
        self._requests = self._answered = self._touched = self._posted = 0
        self._closing = False
        self.failure = ""
        self._thread = threading.Thread(target=self._serve, name="shardmap board", daemon=True)
        self._thread.start()

    def touch(self) -> None:
        """Makes the thread post this rank's progress now; returns at once."""
        with self._wake:
            self._touched += 1
            self._wake.notify_all()

    def look(self, patience: float) -> Mapping[int, Status]:
        """Reads the posts of all ranks; returns older ones if the store does not answer in time."""
        end = monotonic() + patience
        with self._wake:
            self._requests += 1
            request = self._requests
            self._wake.notify_all()
            while self._answered < request and (remaining := end - monotonic()) > 0:
                self._wake.wait(remaining)
            return dict(self._seen)

    def look_on(self, patience: float) -> Mapping[int, Status]:
        """Reads the posts of all ranks until none of them runs, for at most `patience` seconds."""
        end = monotonic() + patience
        while True:
            statuses = self.look(max(0.1, end - monotonic()))
            if monotonic() > end or not any(s.state == "runs" for s in statuses.values()):
                return statuses
            self.pause()

    def reports(self, own: Report, patience: float) -> dict[int, Report]:
        """Reads the reports of the check of `own`: of all ranks, or those of `patience` seconds."""
        reports, end = {self._rank: own}, monotonic() + patience
        while len(reports) < self._size and monotonic() < end:
            for rank, status in self.look(1.0).items():
                if status.report is not None and status.report.number == own.number:
                    reports[rank] = status.report
            self.pause()
        return reports

    def silence(self, rank: int) -> float:
        """Returns the seconds since the last new post of a rank was read."""
        return monotonic() - self._changed_at.get(rank, monotonic())

    def pause(self) -> None:
        """Waits a little, so that others can post."""
        with self._wake:
            self._wake.wait(_PAUSE)

    def close(self) -> None:
        """Posts for the last time and ends the thread, if the store answers in time."""
        with self._wake:
            self._closing = True
            self._wake.notify_all()
        self._thread.join(_FLUSH)

    def _serve(self) -> None:
        closing = False
        while not closing:
            with self._wake:
                is_asked = self._requests > self._answered or self._touched > self._posted
                if not (self._closing or is_asked):
                    self._wake.wait(self._interval)
                closing, request, touched = self._closing, self._requests, self._touched
            try:
                self._store.set(_key(self._rank), self._status().to_json())
                posts = self._read() if request > self._answered else {}
                self.failure = ""
            except Exception as error:  # the store is gone, or its host is
                posts, self.failure = {}, f"{type(error).__name__}: {error}".splitlines()[0]
                if not closing:
                    threading.Event().wait(BEAT / 4)
            with self._wake:
                self._posted = touched
                for rank, status in posts.items():
                    if self._seen.get(rank) != status:
                        self._seen[rank], self._changed_at[rank] = status, monotonic()
                self._answered = request
                self._wake.notify_all()

    def _read(self) -> dict[int, Status]:
        keys = [_key(rank) for rank in range(self._size)]
        present = [key for key in keys if self._store.check([key])] if not self._seen else keys
        if self._reads_many:
            texts = self._store.multi_get(present)
        else:
            texts = [self._store.get(key) for key in present]
        texts_of = dict(zip(present, texts, strict=True))
        return {
            rank: read(texts_of[_key(rank)].decode())
            for rank in range(self._size)
            if _key(rank) in texts_of
        }


def _key(rank: int) -> str:
    return f"shardmap_torch/status/{rank}"


def _own(store: Any, timeout: timedelta) -> Store:
    """Returns a connection of its own to the same store, so that nobody waits for its lock."""
    own: Store = store
    with suppress(AttributeError, RuntimeError, NotImplementedError):
        own = store.clone()
        own.set_timeout(timeout)
    return own

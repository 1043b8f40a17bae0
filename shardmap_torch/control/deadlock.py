"""Deadlock detection: the posted progress of each rank, and the ranks that wait for ever."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from typing import Final, Literal, TypeAlias

PATIENCE: Final = timedelta(seconds=1)
"""Time that a rank waits before it posts, and checks if the wait can end."""

State: TypeAlias = Literal["runs", "waits", "raised", "broken", "disagrees", "exited"]

Report: TypeAlias = tuple[int, str, str]
"""The number, line and text of a rank's call in a check that failed."""

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
        state: it runs, waits for others, has raised an error in its newest call, has failed because
            a rank is gone ("broken") or because ranks disagree, or has exited.
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
        return self.state in ("broken", "disagrees", "exited")


def read(text: str) -> Status:
    """Parses the result of `to_json`."""
    raw = json.loads(text)
    raw["members"] = tuple(raw["members"])
    raw["report"] = None if raw["report"] is None else tuple(raw["report"])
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

"""Votes of all processes through their store: whether they are at the same place with the same.

A process votes where it checks a program; it is then in no collective, and sends nothing until all
others have voted too. Others may be waiting for it in a collective by then. So whoever waits long
looks whether a vote is on that it can never reach, and votes against it: no process hangs.
"""

from dataclasses import dataclass
from datetime import timedelta
from math import inf
from typing import Final, NoReturn

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.source_location import call_site
from shardmap_torch.errors import CollectiveMismatchError

TIME_LIMIT: Final = timedelta(minutes=10)
"""How long a process waits for the votes of the others."""

PATIENCE: Final = timedelta(seconds=1)
"""How long it waits in a collective before it looks for a vote."""


@dataclass(frozen=True, order=True)
class Place:
    """How far a process is: its calls of checked functions, and the steps of the newest one."""

    call: int
    depth: float


class _Counts:
    def __init__(self) -> None:
        self.calls = 0
        self.votes = 0


_COUNTS: Final = _Counts()


def begin_call() -> None:
    """Counts a call of a checked function, which all processes make in the same order."""
    _COUNTS.calls += 1


def here() -> Place:
    """The place of this process; behind all steps outside of a body and in a backward."""
    scope = current_scope()
    monitor = scope.monitor if scope is not None else None
    return Place(_COUNTS.calls, inf if monitor is None else monitor.depth)


def vote(name: str, depth: float, ballot: str, text: str) -> None:
    """Requires that all processes vote the same, at the same place.

    Args:
        name: of the function that is called.
        depth: the steps of the newest call at which this process votes.
        ballot: what is compared; short.
        text: what errors show of it.

    Raises:
        CollectiveMismatchError: another process voted otherwise, or waits elsewhere, or did not
            vote in time; shows what differs, on every process.
    """
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    key = f"shardmap_torch/{_COUNTS.votes}"
    _COUNTS.votes += 1
    place = f"{_COUNTS.calls} {depth}"
    store.set(f"{key}/{rank}", f"{place} {ballot}")
    store.set(f"{key}/on", f"{place} {name}")
    if rank == 0:
        ballots = [_get(store, f"{key}/{r}", name) for r in range(dist.get_world_size())]
        odd = next((r for r, other in enumerate(ballots) if other != ballots[0]), 0)
        store.set(f"{key}/odd", str(odd))
    odd = int(_get(store, f"{key}/odd", name))
    if odd == 0:
        return
    if rank in (0, odd):
        store.set(f"{key}/text/{rank}", text)
    texts = [_get(store, f"{key}/text/{r}", name) for r in (0, odd)]
    raise CollectiveMismatchError(_difference(name, odd, *texts))


def is_overtaken(place: Place) -> bool:
    """Whether a vote is on before the place where this process waits in a collective.

    The voter then sends nothing of what this process waits for.
    """
    called = _called()
    return called is not None and called[0] <= place


def vote_against(what: str) -> NoReturn:
    """Votes from within a collective, which no other ballot equals.

    Raises:
        CollectiveMismatchError: always; shows where the voter is and where this process waits.
    """
    called = _called()
    assert called is not None  # by is_overtaken
    site = call_site() if torch._C._current_graph_task_id() == -1 else None
    text = f"waits in {what}" + (f" at {site}" if site is not None else ", in a backward")
    vote(called[1], here().depth, f"rank {dist.get_rank()} waits", text)
    raise AssertionError("a process in a collective and one out of it have voted the same")


def _called() -> tuple[Place, str] | None:
    """The place of the vote that is on, and the function that it is about."""
    store, key = distributed_c10d._get_default_store(), f"shardmap_torch/{_COUNTS.votes}/on"
    if not store.check([key]):
        return None
    call, depth, name = store.get(key).decode().split(" ", 2)
    return Place(int(call), float(depth)), name


def _get(store: Store, key: str, name: str) -> str:
    try:
        store.wait([key], TIME_LIMIT)
    except dist.DistStoreError as error:
        raise CollectiveMismatchError(
            f"{name}: a process has not checked this call within {TIME_LIMIT}. Every process must "
            "make the same calls of shard_mapped functions, in the same order."
        ) from error
    text: str = store.get(key).decode()
    return text


def _difference(name: str, odd: int, first: str, second: str) -> str:
    """Tells the first lines that differ; where they stand in the source does not count."""
    ours, theirs = first.splitlines(), second.splitlines()
    for mine, other in zip(ours, theirs, strict=False):
        if mine.split("  # ")[0] != other.split("  # ")[0]:
            break
    else:
        shorter = min(len(ours), len(theirs))
        mine, other = ("\n".join(lines[shorter:][:1]) or "  its end" for lines in (ours, theirs))
    return (
        f"{name}: processes run different programs. The first difference:\n"
        f"  rank 0: {mine.strip()}\n"
        f"  rank {odd}: {other.strip()}\n"
        "Fix: run the same code with the same Python values on every process. What depends on the "
        "rank inside of a body is the tensor axis_index(axis)."
    )

"""Waits for other ranks, and ends a wait once one of them can never arrive."""

from collections.abc import Mapping, Sequence

import torch.distributed as dist

from shardmap_torch.control.board import Board
from shardmap_torch.control.deadlock import CHECK, PATIENCE, Status, find_deadlock
from shardmap_torch.control.exchange import Comparison
from shardmap_torch.control.progress import Progress
from shardmap_torch.core.source_location import call_site


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
    except RuntimeError:
        if not work.is_completed():
            return False
        work.wait(PATIENCE)  # its own error, unless it was done right after the patience was over
    return True


class Waiting:
    """The waits of this rank, which it posts, so that others can see who waits for whom."""

    def __init__(self, rank: int, progress: Progress, board: Board) -> None:
        """Posts `progress` to `board`."""
        self._rank, self._progress, self._board = rank, progress, board

    def wait(self, work: dist.Work | Comparison) -> None:
        """Waits for an operation on gloo or a comparison, while the ranks that it needs may arrive.

        Raises:
            StuckError: they cannot arrive.
            RuntimeError: the operation has failed, or taken longer than the group's timeout.
        """
        while not is_done(work):
            self.look_out()
        if self.is_blocked:
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
        path = find_deadlock(self._rank, statuses)
        seen = tuple((r, statuses[r].post, statuses[r].call, statuses[r].state) for r in path)
        if path and seen == progress.suspect:
            raise StuckError(path, statuses)
        progress.suspect = seen

    def block(self) -> None:
        """Posts that this rank waits, unless it has."""
        progress = self._progress
        if progress.is_blocked:
            return
        site = call_site()
        if progress.rank_group.name == CHECK and site is not None:
            progress.doing += f" at {site.place}"
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

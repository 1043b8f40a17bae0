"""Control: checks that all processes make the same calls, bounds waits, and explains failures.

Before a call's first collective all ranks compare a hash of their history: the functions called,
their arguments and checked programs, and every collective since. It is one exchange of 40 bytes a
call, which on up to four ranks is in flight while the body computes. A backward from outside is
compared at its first collective. So no rank sends what another does not expect, which would be
wrong numbers, or, where sizes differ, the end of the process by gloo.
"""

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from datetime import timedelta
from time import monotonic
from traceback import walk_tb
from typing import Any, Final, NoReturn, Protocol, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.control.board import CHECK, Board, RankGroup, Report, Status, Value, lacks
from shardmap_torch.control.exchange import NONE, Comparison, Exchange
from shardmap_torch.control.messages import (
    OF_TORCH,
    are_alike,
    describe_error,
    describe_ranks,
    difference,
    fix_of_torchs,
    note_of_mixed,
    parting_of,
    ranks_text,
    shorten,
    unequal_values,
)
from shardmap_torch.control.parting import fix_of
from shardmap_torch.control.recorder import LENGTH, FlightRecorder, History, usable_folder
from shardmap_torch.control.waiting import Progress, StuckError, Waiting, is_of_handler
from shardmap_torch.core.source_location import call_site, is_in_collective
from shardmap_torch.core.torch_private.engine import (
    current_autograd_node,
    current_graph_task_id,
    default_store,
)
from shardmap_torch.errors import (
    CollectiveMismatchError,
    CommunicationError,
    MeshError,
    SpecError,
    show_shape,
)

_GATHER: Final = 3.0
"""Seconds that an error waits for the posts of the other ranks."""


_REPORTS: Final = 1 << 20
"""More than the number of differences between two recoveries."""

Operand: TypeAlias = tuple[torch.dtype, torch.Size]

_SHARDS: Final = 128
"""Shards that are compared by one message, of 2 KiB: the buffers of sockets have space for it."""


class Values(Protocol):
    """Values that must be equal on ranks.

    Attributes:
        is_late: whether to read them would wait for the device, so that the next check does.
        shards: a hash of each shard of which several ranks have a copy; None where this has none.
    """

    is_late: bool
    shards: Sequence[int | None]

    def digest(self) -> int:
        """Hashes those that all ranks have."""
        ...

    def kinds(self) -> Iterable[str]:
        """Yields lines that are equal where they are compared in the same way."""
        ...

    def rows(self) -> Sequence[Value]:
        """Describes each for errors."""
        ...


_Told: TypeAlias = tuple[str, Sequence[Values]]
"""Text and values of a check, for errors."""


class Control:
    """One process's view of the run; there is one for the default process group.

    Attributes:
        progress: that of this rank, with its newest call, recoveries and failure.
        waiting: its waits for other ranks.
        era: another object after each difference and recovery, which ranks have in common.
        num_errors: grows with each difference, and with recoveries, on all ranks alike.
        compares_each: whether each collective is compared before it begins.
    """

    def __init__(self, timeout: timedelta) -> None:
        """Connects the ranks, so every rank must do so."""
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        self.timeout = timeout
        self.recorder = FlightRecorder()
        self.in_call = self.compares_each = False
        self._history = History(self.recorder)
        self.progress = Progress(self.recorder, self._history)
        self._task = -1
        self._pending: tuple[Comparison, _Told] | None = None
        self._late: list[Values] = []
        self.era = object()
        self.num_errors = 0
        self._everyone = RankGroup(CHECK, tuple(range(self.size)))
        # Other ranks may not read the addresses of an earlier control over this store.
        self._number = default_store().add(f"shardmap_torch/controls/{self.rank}", 1)
        self._num_meshes = 0
        self._exchange = self._connected()
        status = self.progress.status
        self._board = Board(default_store(), self.rank, self.size, status, timeout)
        self.waiting = Waiting(self.rank, self.progress, self._board)

    def _connected(self) -> Exchange:
        key = f"shardmap_torch/exchange/{self._number}/{self.progress.epoch}"
        return Exchange(default_store(), key, self.rank, self.size, self.timeout)

    def set_timeout(self, timeout: timedelta) -> None:
        """Shortens the deadline; a longer one changes nothing."""
        self.timeout = min(timeout, self.timeout)

    def name_mesh(self) -> str:
        """Returns a name for the mesh that all ranks have agreed to make, which no other has."""
        self._num_meshes += 1
        return f"{self._number}.{self._num_meshes}"

    # The calls of this rank.

    def begin_call(self, function: str) -> None:
        """Counts a call of a shard_mapped function.

        Raises:
            MeshError: an earlier error has left the groups in an unknown state.
        """
        progress = self.progress
        if progress.broken:
            raise MeshError(
                f"The processes' meshes are broken since an error: {progress.broken} Messages of "
                "that call may still be under way. Call mesh.recover() on all ranks to go on with "
                "new groups, or end the run and resume it from a checkpoint."
            )
        progress.call, progress.raised = (progress.call[0] + 1, function), ""
        self.in_call = True

    def end_call(self, error: BaseException | None = None) -> None:
        """Ends the call; its error is posted for the ranks that wait for this one.

        Raises:
            CollectiveMismatchError: the other ranks have made another call.
        """
        try:
            if error is None:
                self.resolve()
            elif not self.progress.broken:
                self.progress.raised = describe_error(error)
                self._board.touch()
        finally:
            self.in_call = False

    def check(
        self,
        digest: int,
        text: str,
        now: bool,
        values: Values | None = None,
        doing: str = "",
        step: str = "",
    ) -> None:
        """Starts to compare the history, extended by `digest`, with that of the other ranks.

        Args:
            digest: hash of the next call.
            text: its text for errors.
            now: waits for the result; else `resolve` does, where there is one round of messages.
            values: those that must be equal on ranks; late ones wait for the next check.
            doing: its short description; by default that of the newest call.
            step: its name; by default that of the function.

        Raises:
            CollectiveMismatchError: the ranks differ.
            SpecError: they differ in values only.
            CommunicationError: a rank is gone.
        """
        if self._pending is not None:
            self.resolve()
        compared, self._late = self._late, []
        if values is not None:
            (self._late if values.is_late else compared).append(values)
        for each in compared:
            digest += each.digest()
        progress, told = self.progress, (text, compared)
        number, function = progress.call
        progress.doing = doing or f"call {number} of {function}"
        hashes = self._history.extend(digest, step or function)
        self._begin(hashes, hashes, told)
        # A rank that forwards what it hears must not do anything before that waits for others.
        if now or len(self._exchange.sources) > 1:
            self.resolve()
        for each in compared:
            if each.shards:
                self._compare_shards(each.shards, told)

    def note(self, what: str) -> None:
        """Has the next check compare that this rank has done something outside of calls."""
        self._history.note(what)

    def compare_later(self, values: Values) -> None:
        """Has the next check compare values, too."""
        self._late.append(values)

    def _compare_shards(self, shards: Sequence[int | None], told: _Told) -> None:
        for start in range(0, len(shards), _SHARDS):
            pairs = [NONE if x is None else (x, x) for x in shards[start : start + _SHARDS]]
            _, moves = self._history.extend(0)
            low, high = zip(*pairs, (moves, moves), strict=True)
            self.resolve()
            self._begin(low, high, told)
            self.resolve()

    def _begin(self, low: Sequence[int], high: Sequence[int], told: _Told) -> None:
        """Begins to compare numbers, the last of which is the hash of the collectives."""
        number = self._history.num_checks
        self._pending = Comparison(self._exchange, number, low, high, self.timeout), told

    def resolve(self) -> None:
        """Waits for the pending comparison, if there is one.

        Raises:
            CollectiveMismatchError: the ranks differ.
            SpecError: they differ in values only.
            CommunicationError: a rank is gone, or did not come in time.
        """
        if self._pending is None:
            return
        _, told = self._pending
        are_equal = self._completed()
        if not all(are_equal):
            self._differ(told, is_clean=are_equal[-1])

    def is_common(self, number: int) -> bool:
        """Returns whether all ranks give the same number; all must ask after the same calls.

        Raises:
            CollectiveMismatchError: they do not.
            CommunicationError: a rank is gone, or did not come in time.
        """
        self.resolve()
        _, moves = self._history.extend(0)
        told: _Told = ("", ())
        self._begin((number, moves), (number, moves), told)
        is_common, *are_equal = self._completed()
        if not all(are_equal):
            self._differ(told, is_clean=False)
        return is_common

    def _completed(self) -> Sequence[bool]:
        """Waits for the pending comparison; returns whether each of its numbers is equal."""
        assert self._pending is not None
        (comparison, _), self._pending = self._pending, None
        self.progress.rank_group, doing = self._everyone, self.progress.doing
        try:
            self.waiting.wait(comparison)
        except (RuntimeError, StuckError) as error:
            if is_of_handler(error):
                raise
            self.fail(f"the check of {doing}", error)
        return comparison.are_equal() if comparison.differs else (True,)

    # The collectives of this rank.

    def begin(
        self, operation: Any, x: Tensor, site: Any, rank_group: RankGroup, every: bool
    ) -> None:
        """Records a collective that is about to begin, after the checks that precede it.

        One function, and few calls: after a computation or a wait each finds cold caches.

        Args:
            operation: has `axes`, and a string that identifies it.
            x: its operand.
            site: the user's line, if it is known.
            rank_group: the ranks that it is among.
            every: whether to compare it with the other ranks before it begins.

        Raises:
            CollectiveMismatchError: the other ranks run something else.
            CommunicationError: a rank is gone.
        """
        if self._pending is not None:
            self.resolve()
        dtype, shape, made_in, every = x.dtype, x.shape, 0, every or self.compares_each
        if every or not self.in_call:
            made_in = self._compare_first(operation, (dtype, shape), site, every)
        progress, new = self.progress, self.recorder.new
        progress.rank_group = rank_group
        new.append((progress.call, operation, dtype, shape, site, made_in, rank_group))
        if len(new) >= LENGTH:
            self._history.catch_up()

    def resume(self, rank_group: RankGroup) -> None:
        """Records that this rank waits from now on for a collective that it has begun before."""
        self.progress.rank_group = rank_group

    def _compare_first(self, operation: Any, operand: Operand, site: Any, every: bool) -> int:
        """Compares the first collective of a backward, or each; returns its call, or 0."""
        task = -1 if self.in_call else current_graph_task_id()
        # In a backward the ranks must also agree on the call that it belongs to.
        made_in = getattr(current_autograd_node(), "call", 0) if task != -1 else 0
        if every or task not in (-1, self._task):
            self._task = task
            self._compare(operation, operand, site, made_in)
        return made_in

    def _compare(self, operation: Any, operand: Operand, site: Any, made_in: int) -> None:
        if self.progress.broken:
            self.begin_call("")
        place = f" at {site.place}" if site is not None else ""
        call, function = self.progress.call
        of = f"of call {made_in} " * bool(made_in)
        backward = "" if self.in_call else f"a backward {of}after "
        step = "a backward" if backward else str(operation)
        what = f"{operation} of {show_shape(*operand)}"
        where = f", in {backward}call {call} of {function}"
        key = self._history.key(operation, *operand, made_in)
        self.check(key, f"{what}{place}{where}", now=True, doing=f"{what}{where}", step=step)

    # Errors.

    def fail(self, what: str, error: Exception) -> NoReturn:
        """Raises the error of a failed operation, with the progress of each rank; writes a dump.

        Raises:
            CollectiveMismatchError: the ranks wait for each other in different operations.
            CommunicationError: a rank is gone, has raised an error of its own, or is too late.
        """
        self.waiting.block()
        # The other ranks post a little later that they wait.
        stuck = error if isinstance(error, StuckError) else None
        posts = self._board.look_on(_GATHER) if stuck is None else stuck.statuses
        mine = self.progress.status()
        statuses = {**posts, self.rank: mine}
        missing = [
            rank
            for rank in (self.progress.rank_group.members or self._everyone.members)
            if rank != self.rank and (rank not in statuses or lacks(mine, statuses[rank]))
        ]
        why, is_check = shorten(str(error)), self.progress.rank_group is self._everyone
        site = call_site()
        place = "" if site is None else f" at {site.place}"
        place = self._history.newest if is_check else place
        what += place and f",{place},"
        lines = [f"{what} failed on rank {self.rank}: {why}", *self._described(statuses, missing)]
        states = {statuses[rank].state for rank in missing if rank in statuses}
        if is_check and states & {"ended", "outside"}:
            lines.append(OF_TORCH if "outside" in states else fix_of(self._history.trail()))
        folder = usable_folder()
        if folder is not None:
            lines.append(
                f"The last collectives of each rank are in {folder}; compare them by "
                f"`python -m shardmap_torch postmortem {folder}`."
            )
        text = "\n".join(lines)
        disagree = stuck is not None and stuck.is_disagreement
        self._break(f"{what} failed on rank {self.rank}.", text, disagree)
        kind = CollectiveMismatchError if disagree else CommunicationError
        raise kind(text) from None  # it has the text of `error`

    def _break(self, why: str, text: str, disagree: bool) -> None:
        progress = self.progress
        progress.failed, progress.broken = "disagrees" if disagree else "broken", why
        self._pending = None
        self.recorder.write(self.rank, text)
        self.waiting.unblock()

    def fail_quietly(self, error: BaseException) -> None:
        """Records an error that was raised elsewhere: in the kernels' transfers."""
        if not self.progress.broken:
            self._break(f"{error}".splitlines()[0], f"{error}", disagree=False)

    def _described(self, statuses: Mapping[int, Status], missing: Sequence[int]) -> list[str]:
        silences = {rank: self._board.silence(rank) for rank in statuses if rank != self.rank}
        return describe_ranks(self.size, statuses, missing, silences, self._board.failure)

    def _differ(self, told: _Told, is_clean: bool) -> NoReturn:
        """Posts this rank's report, collects those of the others, and raises their difference."""
        progress = self.progress
        # Not that of the check: checks are counted anew after an error, and an old report may be
        # on the board still.
        self.num_errors += 1
        text, compared = told
        values = [row for each in compared for row in each.rows()]
        text = "\n".join([text, *(line for each in compared for line in each.kinds())])
        place, trail = self._history.newest.removeprefix(" at "), self._history.trail()
        progress.report = own = Report(self.num_errors, place, text, values, trail)
        self._board.touch()
        limit = min(2 * _GATHER, self.timeout.total_seconds())
        reports, name = self._board.reports(own, limit), progress.call[1]
        parting = parting_of(reports)
        is_alike = is_clean and are_alike(reports) and not (parting and parting.are_others)
        unequal = unequal_values(name, reports) if is_alike else ""
        message = unequal or difference(name, reports)
        if is_clean:  # no message is in flight, and every rank knows
            self._history.clear()
            self.era = object()
            self._late.clear()
            progress.call = 0, progress.call[1]
            self.recorder.write(self.rank, message)
        else:
            self._break("the ranks have not done the same.", message, disagree=True)
        raise (SpecError if unequal else CollectiveMismatchError)(message)

    # Going on, and ending.

    def recover(self) -> None:
        """Waits until all ranks call it, and starts again with a new group.

        Raises:
            CommunicationError: a rank did not come in time; names it.
        """
        progress = self.progress
        progress.restart()
        self._pending, self._late, self.era = None, [], object()
        self._board.touch()
        # Others may be waiting for a message still, for as long, before they call it.
        end = monotonic() + self.timeout.total_seconds() + _GATHER
        late = list(self._everyone.members)
        while late and monotonic() < end:
            statuses = self._board.look(1.0)
            late = [r for r in late if r not in statuses or statuses[r].epoch < self.progress.epoch]
            self._board.pause()
        if late:
            progress.broken = f"recover() has not been called by {ranks_text(late)}."
            described = "\n".join(self._described(self._board.look(1.0), late))
            raise CommunicationError(
                f"recover() was not called by all ranks within {self.timeout}:\n{described}"
            )
        self._history.restart()
        self.num_errors = self.progress.epoch * _REPORTS  # the same again on all ranks
        progress.call = 0, ""
        self._exchange.close()
        self._exchange = self._connected()
        progress.broken = ""

    def exit(self, error: BaseException | None = None) -> None:
        """Posts that this process is about to end, and because of which error."""
        progress = self.progress
        if error is not None:
            progress.raised = progress.raised or describe_error(error)
            if note := note_of_mixed(error):
                error.add_note(note)
            elif is_in_collective([frame for frame, _ in walk_tb(error.__traceback__)][::-1]):
                posts = {**self._board.look(_GATHER), self.rank: progress.status()}
                lines = ["The ranks:", *self._described(posts, ()), fix_of_torchs(error)]
                error.add_note("\n".join(lines))
            return
        progress.exited = True
        with suppress(Exception):
            self._board.close()
        self._exchange.close()

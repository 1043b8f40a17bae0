"""Progress: what this rank posts about itself, for ranks that wait for it."""

from collections.abc import Sequence
from typing import Any

from shardmap_torch.control.deadlock import CHECK, RankGroup, Report, State, Status
from shardmap_torch.control.history import History
from shardmap_torch.control.recorder import Recorder


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

    def __init__(self, recorder: Recorder, history: History) -> None:
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
        where = f"call {number} of {function}" if number else "its start"
        before = f"; its last collective is {last}" if last is not None else ""
        if self.exited:
            why = f" after it {self.raised}" if self.raised else ""
            return "exited", f"has exited{why}, in or after {where}{before}"
        if self.broken:
            return self.failed, f"has failed before: {self.broken}"
        if self.raised:
            return "raised", f"{self.raised}, in {where}"
        if self.is_blocked and self.rank_group.name == CHECK:
            return "waits", f"waits in the check of {self.doing}"
        if self.is_blocked:
            return "waits", f"waits in {last}"
        return "runs", f"runs, in or after {where}{before}"

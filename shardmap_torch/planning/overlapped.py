"""The lanes of overlapped kernels in a run without data: their own messages beside their matmuls.

The kernels run as on GPUs, chunk by chunk in the order of their schedules. What they ask of the
lanes, here, are numbers of steps: a message begins when what it was told to wait for is computed,
and what awaits it is computed when it has arrived.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

from torch import Tensor

from shardmap_torch.collectives.operations import collective_of
from shardmap_torch.kernels.lanes import Lane
from shardmap_torch.kernels.transport import NcclTransport
from shardmap_torch.types import V

if TYPE_CHECKING:
    from shardmap_torch.planning.dry_run import Tape


class StepLanes:
    """The lanes of a rank whose work is recorded on a tape; marks are numbers of steps."""

    def __init__(self, tape: "Tape", axes: tuple[str, ...], num_ranks: int) -> None:
        self._tape, self._axes = tape, axes
        ring = tuple((rank, (rank + 1) % num_ranks) for rank in range(num_ranks))
        self._next = collective_of("ppermute", V, V, axes, perm=ring)
        self._last: int | None = None
        self._after = 0

    def record(self, lane: Lane) -> int | None:
        return self._last if lane is Lane.TRANSFER else len(self._tape.run.steps)

    def wait(self, lane: Lane, mark: Any) -> None:
        """Lets later messages begin after the steps of a mark, or waits for its message."""
        if lane is Lane.TRANSFER:
            self._after = max(self._after, mark)
        elif mark is not None:
            self._tape.step("wait for a chunk", axes=self._axes, number=mark, waits=True)

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Does nothing: memory is freed when nothing refers to it."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Changes nothing: only messages are issued so."""
        return nullcontext()

    def permute(self, sent: Tensor, target: int, received: Tensor, source: int) -> Sequence[Any]:
        """Records a message; the one that arrives travels at the same time."""
        self._last = len(self._tape.run.steps)
        self._tape.send(
            self._next.move, self._next, sent, sent=sent.nbytes, hops=1, number=self._last,
            after=self._after,
        )  # fmt: skip
        return ()


def transport_of(tape: "Tape", axes: tuple[str, ...], num_ranks: int) -> NcclTransport:
    """Returns the first rank's end of a network without data."""
    lanes = StepLanes(tape, axes, num_ranks)
    return NcclTransport(0, num_ranks, str(axes), lanes, lanes.permute)

"""Order between the streams of one rank, in the four verbs that a kernel needs of CUDA.

A rank issues work to *lanes*. What is issued to one lane runs in that order; between two lanes
there is no order but that of marks: `wait(lane, record(other))`. On a CPU every call is done when
it returns, and the verbs do nothing. The tests put a race detector in their place, which runs the
same kernels and holds every access to memory against the order that the verbs gave.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class Lane(Enum):
    """A stream or thread on which work is issued."""

    COMPUTE = "compute"
    """The caller's current stream: what the caller has issued runs before, what it will, after."""

    TRANSFER = "transfer"
    """The kernels' own stream, which sends and receives while the other one multiplies."""

    HOST = "host"
    """The Python thread. It waits where the network below cannot read a GPU's memory, only there:
    while it waits it issues nothing, and a graph capture is lost."""


Mark: TypeAlias = Any
"""A point in the work of one lane: a `torch.cuda.Event`, or what stands for one."""


class Lanes(Protocol):
    """The lanes of one rank."""

    def record(self, lane: Lane) -> Mark:
        """The point that the work issued to `lane` has reached."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Makes all work issued to `lane` from now on run after `mark`."""

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """The memory of `tensor`, once freed, stays until the work issued to `lane` is done."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Within it, torch issues to `lane`."""


class HostLanes:
    """One lane in truth: each call is done when it returns."""

    def record(self, lane: Lane) -> Mark:
        """Nothing to tell apart."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Done already."""

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Nobody uses it later."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """No change."""
        return nullcontext()


HOST_LANES = HostLanes()


class CudaLanes:
    """Streams and events of one GPU; no verb but `wait(Lane.HOST, ...)` blocks or asks the GPU.

    Args:
        device: The GPU, with its index.
    """

    def __init__(self, device: torch.device) -> None:
        """Makes the transfer stream; its kernels go first, being small and awaited elsewhere."""
        self._device = device
        self._transfer = torch.cuda.Stream(device, priority=-1)

    def record(self, lane: Lane) -> Mark:
        """An event behind what was issued."""
        return self._stream(lane).record_event()

    def wait(self, lane: Lane, mark: Mark) -> None:
        """The stream waits for the event; the host only where it is itself the lane."""
        if lane is Lane.HOST:
            mark.synchronize()
        else:
            self._stream(lane).wait_event(mark)

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Tells the caching allocator."""
        tensor.record_stream(self._stream(lane))

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Makes the stream the current one of this thread."""
        return torch.cuda.stream(self._stream(lane))

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        # Never remembered: a backward may run on another thread, in another stream's context.
        current = torch.cuda.current_stream(self._device)
        return self._transfer if lane is Lane.TRANSFER else current

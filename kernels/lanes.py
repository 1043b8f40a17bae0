"""Lanes: the order between the streams of one rank, in the four verbs that a kernel needs of CUDA.

A rank issues work to *lanes*. What is issued to one lane runs in that order; between two lanes
there is no order but that of marks: `wait(lane, record(other))`. On a CPU every call is done when
it returns, and the verbs do nothing. The tests put a race detector in their place, which runs the
same kernels and checks every access to memory against the order that the verbs gave.
"""

from contextlib import AbstractContextManager, nullcontext
from enum import Enum
from typing import Any, Protocol, TypeAlias

import torch
from torch import Tensor


class Lane(Enum):
    """A stream or thread on which work is issued."""

    COMPUTE = "compute"
    """The caller's current stream: a kernel runs between the caller's earlier and later work."""

    TRANSFER = "transfer"
    """The kernels' own stream, which sends and receives while the other one multiplies."""

    HOST = "host"
    """The Python thread. It waits where the network below cannot read a GPU's memory, only there:
    while it waits it issues nothing, and a graph capture is lost."""


Mark: TypeAlias = Any
"""A point in the work of one lane: a `torch.cuda.Event`, or a replacement in tests."""


class Lanes(Protocol):
    """The lanes of one rank."""

    def record(self, lane: Lane) -> Mark:
        """Marks the end of the work issued to `lane` so far."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Makes all work issued to `lane` from now on run after `mark`."""

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Keeps the memory of `tensor`, once freed, until the work issued to `lane` is done."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Makes torch issue work to `lane` within the context."""


class HostLanes:
    """The lanes of a CPU, which are one: each call is done when it returns."""

    def record(self, lane: Lane) -> Mark:
        """Returns no mark: there is nothing to order."""

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Does nothing: the work is done already."""

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Does nothing: no work is pending that could use it."""

    def on(self, lane: Lane) -> AbstractContextManager[object]:
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
        """Records an event behind the issued work."""
        return self._stream(lane).record_event()

    def wait(self, lane: Lane, mark: Mark) -> None:
        """Makes the stream wait for the event; blocks the host only if it is the lane."""
        if lane is Lane.HOST:
            mark.synchronize()
        else:
            self._stream(lane).wait_event(mark)

    def keep(self, lane: Lane, tensor: Tensor) -> None:
        """Records the use with the caching allocator."""
        tensor.record_stream(self._stream(lane))

    def on(self, lane: Lane) -> AbstractContextManager[object]:
        """Makes the stream the current one of this thread."""
        return torch.cuda.stream(self._stream(lane))

    def _stream(self, lane: Lane) -> torch.cuda.Stream:
        # Not cached: a backward may run on another thread, in another stream's context.
        current = torch.cuda.current_stream(self._device)
        return self._transfer if lane is Lane.TRANSFER else current

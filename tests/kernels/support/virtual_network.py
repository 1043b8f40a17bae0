"""All ranks of an axis in one process, with an alpha-beta clock instead of time.

The kernels run as they are. Data really moves (unless tensors are on the meta device), so results
are exact; every transfer is logged, a cycle of waits is an error, and a buffer that is written
while it is being sent is caught.

The clock: a rank's link carries one message at a time in each direction, first ready, first
served, and in the order of sending where several are ready at once. A message is ready when it has
been sent and its receive has been posted, and arrives latency + bytes / bandwidth after it starts.
Computing advances the rank's own clock.
"""

import heapq
import itertools
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch
from torch import Tensor

from shardmap_torch.errors import KernelError, listing
from shardmap_torch.kernels.lanes import HOST_LANES, Lanes
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.transport import Envelope, Handle, Steps, TagCounter

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Transfer:
    """One line of the log."""

    envelope: Envelope
    num_bytes: int
    begin: float
    end: float


@dataclass(slots=True)
class VirtualHandle:
    """One side of a transfer; `done_at` is set once the clock has reached its end."""

    tensor: Tensor
    envelope: Envelope
    issued_at: float
    rank: int
    order: int
    sent: Tensor | None = None
    done_at: float | None = None

    def wait(self) -> None:
        """Never called: the network resumes the kernel when the transfer is done."""
        raise KernelError("a virtual transfer is waited for by VirtualNetwork.run, not by itself")


@dataclass(slots=True)
class VirtualTransport(TagCounter):
    """One rank's end of a virtual network."""

    network: "VirtualNetwork"
    rank: int
    clock: float = 0.0
    _order: Iterator[int] = field(default_factory=itertools.count)

    @property
    def num_ranks(self) -> int:
        """Ranks on the network."""
        return self.network.num_ranks

    @property
    def lanes(self) -> Lanes:
        """No streams: a rank's clock is one lane."""
        return HOST_LANES

    def send(self, tensor: Tensor, envelope: Envelope) -> VirtualHandle:
        """Issues a send at this rank's time, keeping a copy to compare with at the end."""
        order, copy = next(self._order), tensor.clone()
        handle = VirtualHandle(tensor, envelope, self.clock, self.rank, order, sent=copy)
        return self.network.issue(envelope.message.source, self.network.sends, handle)

    def receive(self, tensor: Tensor, envelope: Envelope) -> VirtualHandle:
        """Issues a receive; the buffer is poisoned so that early use shows in the result."""
        order = next(self._order)
        handle = VirtualHandle(_poison(tensor), envelope, self.clock, self.rank, order)
        return self.network.issue(envelope.message.target, self.network.receives, handle)

    def charge(self, flops: float, traffic: float) -> None:
        """Advances this rank's clock."""
        self.clock += self.network.fabric.compute(flops, traffic)


def _poison(tensor: Tensor) -> Tensor:
    return tensor.fill_(float("nan") if tensor.is_floating_point() else 111)


@dataclass(slots=True)
class _Process(Generic[T]):
    """A kernel under way on one rank."""

    transport: VirtualTransport
    steps: Steps[T]
    blocked_on: Handle | None = None
    result: list[T] = field(default_factory=list)

    def advance(self) -> None:
        """Runs the kernel until it waits for a transfer that is not done, or ends."""
        while not self.result:
            handle = self.blocked_on
            if handle is not None:
                assert isinstance(handle, VirtualHandle)
                if handle.done_at is None:
                    return
                self.transport.clock = max(self.transport.clock, handle.done_at)
            try:
                self.blocked_on = next(self.steps)
            except StopIteration as done:
                self.result.append(done.value)


Key = tuple[int, int, int]


class VirtualNetwork:
    """`num_ranks` virtual ranks on `fabric`.

    Args:
        num_ranks: Ranks on the axis.
        fabric: Speed of the links and of the ranks.
        dedicated_links: A link for each pair of ranks, as in a ring of cables; otherwise each rank
            has one link to a switch.

    Example:
        >>> from shardmap_torch.kernels.schedule import Chunk, Message
        >>> from shardmap_torch.kernels.transport import Channel
        >>> def hello(transport):
        ...     channel = Channel.open(transport, "hello", num_parts=1)
        ...     message = Message(source=0, target=1, chunk=Chunk(0, 0), step=1)
        ...     x = torch.full((4,), float(transport.rank + 1))
        ...     start = channel.send if transport.rank == 0 else channel.receive
        ...     yield start(x, message)
        ...     return x.tolist()
        >>> network = VirtualNetwork(2, Fabric(latency=1.0, bandwidth=16.0, flops=1.0))
        >>> network.run(hello), network.seconds
        ([[1.0, 1.0, 1.0, 1.0], [1.0, 1.0, 1.0, 1.0]], 2.0)
    """

    def __init__(self, num_ranks: int, fabric: Fabric, *, dedicated_links: bool = False) -> None:
        """Starts every clock at 0."""
        self.num_ranks = num_ranks
        self.fabric = fabric
        self.dedicated_links = dedicated_links
        self.transports = [VirtualTransport(self, rank) for rank in range(num_ranks)]
        self.log: list[Transfer] = []
        self.sends: dict[Key, VirtualHandle] = {}
        self.receives: dict[Key, VirtualHandle] = {}
        self._ready: list[tuple[float, int, Key]] = []
        self._free_at: dict[Hashable, float] = {}

    @property
    def seconds(self) -> float:
        """The latest clock."""
        return max(transport.clock for transport in self.transports)

    def run(self, kernel: Callable[[VirtualTransport], Steps[T]]) -> list[T]:
        """Runs `kernel` on every rank and returns the results by rank.

        Raises:
            KernelError: If the ranks wait for one another in a circle, messages are left over,
                or a buffer was written while it was being sent.
        """
        processes = [_Process(transport, kernel(transport)) for transport in self.transports]
        while True:
            for process in processes:
                process.advance()
            if all(process.result for process in processes):
                break
            self._deliver_next(processes)
        self._deliver_rest()
        return [process.result[0] for process in processes]

    def issue(
        self, rank: int, side: dict[Key, VirtualHandle], handle: VirtualHandle
    ) -> VirtualHandle:
        """Enters one side of a transfer, which starts when the other side is there too."""
        message, tensor = handle.envelope.message, handle.tensor
        key = (message.source, message.target, handle.envelope.tag)
        if rank != handle.rank or key in side or not tensor.is_contiguous():
            raise KernelError(
                f"{self._describe(handle)}: not this rank's message, a tag already in use, or a "
                f"buffer that is not contiguous"
            )
        side[key] = handle
        if key in self.sends and key in self.receives:
            send, receive = self.sends[key], self.receives[key]
            ready_at = max(send.issued_at, receive.issued_at)
            heapq.heappush(self._ready, (ready_at, send.order, key))
        return handle

    def _describe(self, handle: VirtualHandle) -> str:
        return handle.envelope.describe(handle.rank, "virtual")

    def _deliver_next(self, processes: Sequence[_Process[T]]) -> None:
        """Carries the transfer that was ready first.

        Every rank is blocked, so nothing issued later can be ready before it: the order is exact.
        """
        if not self._ready:
            waits = [
                self._describe(p.blocked_on)
                for p in processes
                if not p.result and isinstance(p.blocked_on, VirtualHandle)
            ]
            raise KernelError(listing("deadlock, every rank that is not done waits:", waits))
        ready_at, _, key = heapq.heappop(self._ready)
        self._deliver(ready_at, key)

    def _links(self, key: Key) -> tuple[Hashable, Hashable]:
        """Returns the links that are busy: the source's outgoing and the target's incoming one."""
        source, target, _ = key
        pair = (source, target) if self.dedicated_links else None
        return ("out", pair or source), ("in", pair or target)

    def _deliver(self, ready_at: float, key: Key) -> None:
        links = self._links(key)
        send, receive = self.sends.pop(key), self.receives.pop(key)
        num_bytes = send.tensor.numel() * send.tensor.element_size()
        begin = max(ready_at, *(self._free_at.get(link, 0.0) for link in links))
        sent = begin + num_bytes / self.fabric.bandwidth
        self._free_at.update(dict.fromkeys(links, sent))
        send.done_at, receive.done_at = sent, begin + self.fabric.transfer(num_bytes)
        self._check_unchanged(send)
        receive.tensor.copy_(send.tensor)
        self.log.append(Transfer(send.envelope, num_bytes, begin, receive.done_at))

    def _check_unchanged(self, send: VirtualHandle) -> None:
        unchanged = send.tensor.is_meta or torch.equal(send.tensor, send.sent)  # type: ignore[arg-type]
        if not unchanged:
            raise KernelError(f"{self._describe(send)}: the buffer was written while being sent")

    def _deliver_rest(self) -> None:
        """Delivers what a kernel does not wait for, which would leak into a later call."""
        rest = [self._describe(h) for side in (self.sends, self.receives) for h in side.values()]
        if rest:
            raise KernelError(listing("transfers that nobody waited for:", rest))

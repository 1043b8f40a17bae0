"""Protocol between kernels and networks, and the loop that runs kernel code on one.

A kernel is a generator: it yields each `Handle` that it has to wait for and is resumed when the
transfer is done. `run` waits for real; `VirtualNetwork` runs the generators of all ranks in one
process and moves a clock instead. The kernel code is the same.

Over gloo and NCCL messages go on a process group of the kernels' own; over a network that reads
only the host's memory they are staged there.
"""

from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.lanes import HOST_LANES, Lane, Lanes, Mark
from shardmap_torch.kernels.schedule import Message, num_tags, tag

T = TypeVar("T")


class Handle(Protocol):
    """A transfer under way."""

    def wait(self) -> None:
        """Waits until the compute lane may use the buffer; KernelError if the transfer failed."""


Steps: TypeAlias = Generator[Handle, None, T]


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message of one call: the operation it belongs to and its tag on the wire."""

    op: str
    message: Message
    tag: int

    def describe(self, rank: int, axis: str) -> str:
        """Describes the transfer that `rank` waits for, in error messages."""
        message = self.message
        sends = rank == message.source
        verb, peer = ("sends", message.target) if sends else ("receives", message.source)
        link = "to" if sends else "from"
        return (
            f"{self.op} over axis {axis!r}: at step {message.step}, rank {rank} {verb} part "
            f"{message.chunk.part} of block {message.chunk.owner} {link} rank {peer}"
        )


def transfer_failure(envelope: Envelope, rank: int, axis: str, error: RuntimeError) -> KernelError:
    """Makes the error of a failed transfer."""
    return KernelError(
        f"{envelope.describe(rank, axis)}, and the transfer failed: {error}\n"
        "Either that rank has died, or it does not run the same kernel; see its own error first."
    )


class Transport(Protocol):
    """Point-to-point transfers between the ranks of one mesh axis, on the transfer lane.

    The caller orders the lanes: before a send the transfer lane has waited for what wrote the
    tensor, before a receive for what used the buffer last.
    """

    @property
    def rank(self) -> int:
        """This process's position on the axis."""

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the axis."""

    @property
    def lanes(self) -> Lanes:
        """This rank's streams."""

    def reserve_tags(self, count: int) -> int:
        """Returns the first of `count` tags that no call in flight uses; equal on all ranks."""

    def send(self, tensor: Tensor, envelope: Envelope) -> Handle:
        """Starts sending a contiguous tensor, which must stay as it is until the handle is done."""

    def receive(self, tensor: Tensor, envelope: Envelope) -> Handle:
        """Announces a contiguous buffer, which holds the message once the handle is done."""

    def charge(self, flops: float, traffic: float) -> None:
        """Adds this rank's last computation to the transport's clock, in flops and bytes moved."""


@dataclass(frozen=True, slots=True)
class Channel:
    """The messages of one call of one operation on a transport."""

    transport: Transport
    op: str
    num_parts: int
    first_tag: int

    @classmethod
    def open(cls, transport: Transport, op: str, num_parts: int) -> "Channel":
        """Reserves the tags of one call; all ranks open their channels in the same order."""
        first_tag = transport.reserve_tags(num_tags(transport.num_ranks, num_parts))
        return cls(transport, op, num_parts, first_tag)

    def _envelope(self, message: Message) -> Envelope:
        return Envelope(self.op, message, self.first_tag + tag(message, self.num_parts))

    def send(self, tensor: Tensor, message: Message) -> Handle:
        return self.transport.send(tensor, self._envelope(message))

    def receive(self, tensor: Tensor, message: Message) -> Handle:
        return self.transport.receive(tensor, self._envelope(message))


def network_of(group: dist.ProcessGroup, device_type: str) -> str:
    """Returns the backend that transfers a group's tensors of a device type, or an empty string."""
    try:
        return str(group._get_backend(torch.device(device_type)).name())
    except RuntimeError:
        return ""


class TagCounter:
    """Base of transports: hands out disjoint ranges of tags.

    Starts again at 0 where gloo's 32-bit tags would end.
    """

    LIMIT = 2**30
    _next = 0

    def reserve_tags(self, count: int) -> int:
        first = self._next if self._next + count <= self.LIMIT else 0
        self._next = first + count
        return first

    def charge(self, flops: float, traffic: float) -> None:
        """Does nothing: real computation takes real time."""


def run(steps: Steps[T]) -> T:
    """Runs a kernel on a real transport, waiting for each transfer it needs."""
    while True:
        try:
            handle = next(steps)
        except StopIteration as done:
            value: T = done.value
            return value
        handle.wait()


@dataclass(frozen=True, slots=True)
class GlooHandle:
    """A gloo transfer in flight; an error names the axis, the step and the peer."""

    work: dist.Work
    envelope: Envelope
    rank: int
    axis: str

    def wait(self) -> None:
        """Blocks without the GIL, at most for the group's timeout."""
        try:
            self.work.wait()
        except RuntimeError as error:
            raise transfer_failure(self.envelope, self.rank, self.axis, error) from error


class GlooTransport(TagCounter):
    """Transfers between the ranks of `axis` on a gloo group that nothing else uses.

    gloo moves bytes on a thread of its own, so a transfer goes on while this thread multiplies.

    Args:
        group: A process group whose point-to-point traffic is the kernels' alone. Collectives of
            other code on the same group are harmless, its sends and receives are not: their tags
            may meet the kernels'.
        axis: Mesh axis, for error messages.

    Raises:
        KernelError: If the group has no gloo backend for CPU tensors.
    """

    lanes = HOST_LANES

    def __init__(self, group: dist.ProcessGroup, axis: str) -> None:
        """Checks the backend; no communication."""
        backend = network_of(group, "cpu")
        if backend != "gloo":
            raise KernelError(
                f"the kernels' transport over axis {axis!r} needs a gloo group, got {backend!r}"
            )
        self.rank = dist.get_rank(group)
        self.num_ranks = dist.get_world_size(group)
        self.axis = axis
        self._group = group

    def send(self, tensor: Tensor, envelope: Envelope) -> GlooHandle:
        return self._start(self._group.send, tensor, envelope.message.target, envelope)

    def receive(self, tensor: Tensor, envelope: Envelope) -> GlooHandle:
        return self._start(self._group.recv, tensor, envelope.message.source, envelope)

    def _start(
        self,
        transfer: Callable[[list[Tensor], int, int], dist.Work],
        tensor: Tensor,
        peer: int,
        envelope: Envelope,
    ) -> GlooHandle:
        # ProcessGroup.send and recv rather than isend and irecv: group ranks without translation,
        # and 4 microseconds less Python for each of many small messages.
        try:
            work = transfer([tensor], peer, envelope.tag)
        except RuntimeError as error:
            raise transfer_failure(envelope, self.rank, self.axis, error) from error
        return GlooHandle(work, envelope, self.rank, self.axis)


# NCCL runs the operations of a group one after the other, and one that waits for its peer blocks
# all behind it: a receive issued before the send that its peer waits for would wait for ever. So
# a message is issued together with its *mate*, the arrival of the same step and part from as many
# ranks away on the other side. In every schedule a rank sends and receives one message of each
# kind, and all ranks send in the same order: the n-th operations of all ranks are one
# permutation, and none waits for another's later one.


class Work(Protocol):
    """An operation that was issued; `dist.Work`, as far as it is used."""

    def wait(self) -> object:
        """Makes the current stream wait for it, not the host."""


Permute: TypeAlias = Callable[[Tensor, int, Tensor, int], Iterable[Work]]
"""Sends a tensor to one rank and receives another from a second one, in one operation."""


def batched(group: dist.ProcessGroup) -> Permute:
    """Makes the operation on `group`, issued to NCCL's stream behind the current one."""

    def permute(sent: Tensor, target: int, received: Tensor, source: int) -> Iterable[Work]:
        works: list[dist.Work] = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, sent, group=group, group_peer=target),
                dist.P2POp(dist.irecv, received, group=group, group_peer=source),
            ]
        )
        return works

    return permute


@dataclass(slots=True)
class Arrival:
    """A receive that was announced, and is issued together with its mate."""

    tensor: Tensor
    envelope: Envelope
    transport: "NcclTransport"
    issued: Handle | None = None

    def wait(self) -> None:
        """Makes the compute lane wait for the operation that contains this message."""
        if self.issued is None:
            transport = self.transport
            where = self.envelope.describe(transport.rank, transport.axis)
            raise KernelError(f"{where}, but awaits it before the send that it travels with")
        self.issued.wait()


@dataclass(frozen=True, slots=True)
class Issued:
    """An operation in flight; waiting blocks the compute lane, never the host."""

    works: Iterable[Work]
    lanes: Lanes
    mark: Mark

    def wait(self) -> None:
        """Makes the compute lane wait for this operation, not for those issued since."""
        self.lanes.wait(Lane.COMPUTE, self.mark)


@dataclass
class NcclTransport(TagCounter):
    """Transfers between the ranks of `axis` that never block the host.

    Tags identify its calls: NCCL has none.

    Attributes:
        rank: This process's position on the axis.
        num_ranks: Ranks on the axis.
        axis: Mesh axis, for error messages.
        lanes: This rank's streams.
        permute: Issues one operation; `batched`, except in tests.
    """

    rank: int
    num_ranks: int
    axis: str
    lanes: Lanes
    permute: Permute
    _announced: dict[tuple[int, int], Arrival] = field(default_factory=dict)

    @classmethod
    def over(cls, group: dist.ProcessGroup, axis: str, lanes: Lanes) -> "NcclTransport":
        """Makes one on a group whose point-to-point traffic is the kernels' alone."""
        return cls(dist.get_rank(group), dist.get_world_size(group), axis, lanes, batched(group))

    def receive(self, tensor: Tensor, envelope: Envelope) -> Arrival:
        """Announces a buffer; nothing is issued before the send that it travels with."""
        arrival = Arrival(tensor, envelope, self)
        self._announced[self._key(envelope)] = arrival
        return arrival

    def send(self, tensor: Tensor, envelope: Envelope) -> Issued:
        """Issues the message, and its mate."""
        mate = self._announced.pop(self._key(envelope), None)
        if mate is None:
            where = envelope.describe(self.rank, self.axis)
            raise KernelError(f"{where}, but receives nothing that could travel with it")
        message, other = envelope.message, mate.envelope.message
        with self.lanes.on(Lane.TRANSFER):
            try:
                works = self.permute(tensor, message.target, mate.tensor, other.source)
            except RuntimeError as error:
                raise transfer_failure(envelope, self.rank, self.axis, error) from error
            for work in works:
                work.wait()  # The transfer lane waits; later operations could not overtake anyway.
        issued = Issued(works, self.lanes, self.lanes.record(Lane.TRANSFER))
        mate.issued = issued
        return issued

    def _key(self, envelope: Envelope) -> tuple[int, int]:
        """Returns the key that a message and its mate share; the tag encodes call, step, part."""
        message = envelope.message
        return envelope.tag, (message.target - message.source) % self.num_ranks


# Each message passes through a buffer on the host. The host waits for the copy into it, because
# gloo reads it at once; what was issued to the GPU before goes on meanwhile. This is for tests of
# several ranks on one GPU, and for machines without NCCL. It cannot be captured in a graph.


Allocate: TypeAlias = Callable[[Tensor], Tensor]


def pinned(like: Tensor) -> Tensor:
    """Allocates a host buffer of the same shape, which the GPU can copy to and from by itself."""
    return torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=True)


@dataclass(frozen=True, slots=True)
class StagedArrival:
    """A receive into the host's buffer, to be copied to the GPU."""

    work: Handle
    buffer: Tensor
    tensor: Tensor
    lanes: Lanes

    def wait(self) -> None:
        """Blocks until the message is on the host; the compute lane waits for the copy."""
        self.work.wait()
        with self.lanes.on(Lane.TRANSFER):
            self.tensor.copy_(self.buffer, non_blocking=True)
        self.lanes.wait(Lane.COMPUTE, self.lanes.record(Lane.TRANSFER))


@dataclass(frozen=True, slots=True)
class StagedTransport:
    """Transfers over `network`, whose tensors are on the host.

    Attributes:
        network: The transport below.
        lanes: This rank's streams.
        allocate: Allocates a host buffer like a tensor; `pinned`, except in tests.
    """

    network: Transport
    lanes: Lanes
    allocate: Allocate = pinned

    @property
    def rank(self) -> int:
        return self.network.rank

    @property
    def num_ranks(self) -> int:
        return self.network.num_ranks

    def reserve_tags(self, count: int) -> int:
        return self.network.reserve_tags(count)

    def charge(self, flops: float, traffic: float) -> None:
        self.network.charge(flops, traffic)

    def send(self, tensor: Tensor, envelope: Envelope) -> Handle:
        """Sends as soon as the copy on the host is complete."""
        buffer = self.allocate(tensor)
        with self.lanes.on(Lane.TRANSFER):
            buffer.copy_(tensor, non_blocking=True)
        self.lanes.wait(Lane.HOST, self.lanes.record(Lane.TRANSFER))
        return self.network.send(buffer, envelope)

    def receive(self, tensor: Tensor, envelope: Envelope) -> StagedArrival:
        buffer = self.allocate(tensor)
        return StagedArrival(self.network.receive(buffer, envelope), buffer, tensor, self.lanes)

"""Protocol between kernels and networks, and the loop that runs kernel code on one.

A kernel is a generator: it yields each `Handle` that it has to wait for and is resumed when the
transfer is done. `run` waits for real; `VirtualNetwork` runs the generators of all ranks in one
process and moves a clock instead. The kernel code is the same.
"""

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.planning.schedule import Message, num_tags, tag
from shardmap_torch.kernels.transports.streams import Lanes

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
        """Starts sending `message`."""
        return self.transport.send(tensor, self._envelope(message))

    def receive(self, tensor: Tensor, message: Message) -> Handle:
        """Posts the receive of `message`."""
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
        """Returns the first tag of the next `count`."""
        first = self._next if self._next + count <= self.LIMIT else 0
        self._next = first + count
        return first


def run(steps: Steps[T]) -> T:
    """Runs a kernel on a real transport, waiting for each transfer it needs."""
    while True:
        try:
            handle = next(steps)
        except StopIteration as done:
            value: T = done.value
            return value
        handle.wait()

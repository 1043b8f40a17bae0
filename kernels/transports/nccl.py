"""Point-to-point transfers over an NCCL process group of the kernels' own.

NCCL runs the operations of a group one after the other, and one that waits for its peer blocks all
behind it: a receive issued before the send that its peer waits for would wait for ever. So a
message is issued together with its *mate*, the arrival of the same step and part from as many ranks
away on the other side. In every schedule a rank sends and receives one message of each kind, and
all ranks send in the same order: the n-th operations of all ranks are one permutation, and none
waits for another's later one.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol, TypeAlias

import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.transports.protocol import (
    Envelope,
    Handle,
    TagCounter,
    transfer_failure,
)
from shardmap_torch.kernels.transports.streams import Lane, Lanes, Mark


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

    def charge(self, flops: float, traffic: float) -> None:
        """Does nothing: real computation takes real time."""

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

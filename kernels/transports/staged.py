"""Transfers of a GPU's memory over a network that reads only the host's, such as gloo.

Each message passes through a buffer on the host. The host waits for the copy into it, because gloo
reads it at once; what was issued to the GPU before goes on meanwhile. This is for tests of several
ranks on one GPU, and for machines without NCCL. It cannot be captured in a graph.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor

from shardmap_torch.kernels.transports.protocol import Envelope, Handle, Transport
from shardmap_torch.kernels.transports.streams import Lane, Lanes

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
        """This process's position on the axis."""
        return self.network.rank

    @property
    def num_ranks(self) -> int:
        """Ranks on the axis."""
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
        """Posts a receive on the host."""
        buffer = self.allocate(tensor)
        return StagedArrival(self.network.receive(buffer, envelope), buffer, tensor, self.lanes)

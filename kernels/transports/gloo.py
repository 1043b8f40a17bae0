"""Point-to-point transfers over a gloo process group of the kernels' own."""

from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.transports.protocol import (
    Envelope,
    TagCounter,
    network_of,
    transfer_failure,
)
from shardmap_torch.kernels.transports.streams import HOST_LANES


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
        """Starts a send to the message's target."""
        return self._start(self._group.send, tensor, envelope.message.target, envelope)

    def receive(self, tensor: Tensor, envelope: Envelope) -> GlooHandle:
        """Posts a receive from the message's source."""
        return self._start(self._group.recv, tensor, envelope.message.source, envelope)

    def charge(self, flops: float, traffic: float) -> None:
        """Does nothing: real computation takes real time."""

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

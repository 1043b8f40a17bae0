"""The exchanges as one typed collective each, over the whole matrix: no chunks, no messages.

With these in place of its transport a kernel is ordinary code of a body: the checker interprets
it, backward included, and on simulated ranks its formulas run as they are. Forward and backward of
the kernels know no difference.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from torch import Tensor

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.kernels.transports.executor import (
    Choice,
    Consume,
    Gather,
    Produce,
    Scatter,
    Sum,
)
from shardmap_torch.kernels.transports.protocol import Steps, Transport
from shardmap_torch.types import AxisType, Partial, R, V


@dataclass(frozen=True, slots=True)
class Collectives:
    """The collectives along some axes, where a kernel has a transport, or operators that are fused.

    Attributes:
        backend: Of the body.
        axes: Over which the kernel communicates.
        reduced: What an all-reduce of the forward is for.
    """

    backend: Backend
    axes: tuple[str, ...]
    reduced: AxisType = R

    @property
    def num_ranks(self) -> int:
        """Ranks on the axes."""
        return self.backend.mesh.num_ranks(self.axes)

    def charge(self, flops: float, traffic: float) -> None:
        """There is no clock."""

    def run(self, name: str, src: AxisType, dst: AxisType, x: Tensor, dim: int = 0) -> Tensor:
        """The collective of that name and types, along `dim` where it cuts."""
        return bind(self.backend, Collective(name, src, dst, self.axes, dim=dim), x)

    def gather_matmul(
        self, x: Tensor, ws: Sequence[Tensor], dim: int
    ) -> tuple[Tensor, Sequence[Tensor]]:
        """Returns the gathered x and its products, like the operator of symmetric memory."""
        full = self.run("all_gather", V, R, x, dim)
        return full, [full @ w for w in ws]

    def matmul_scatter(self, x: Tensor, w: Tensor, dim: int) -> Tensor:
        """Returns this rank's block of the sum of x @ w, like the operator of symmetric memory."""
        return self.run("reduce_scatter", Partial, V, x @ w, dim)


Network: TypeAlias = Transport | Collectives


class Halves(Protocol):
    """An exchange in two halves, between which the caller may compute."""

    def start(self) -> Steps[None]:
        """The first half."""

    def finish(self) -> Steps[Tensor]:
        """The second half; returns the gathered or summed matrix."""


def gathering(
    transport: Network, op: str, shard: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """`exchange.Gather` on a transport, or one all-gather."""
    if isinstance(transport, Collectives):
        return _WholeGather(transport, shard, consume)
    return Gather(transport, op, shard, consume, choice)


def scattering(
    transport: Network, op: str, produce: Produce, out: Tensor, num_rows: int, choice: Choice
) -> Halves:
    """`exchange.Scatter` of the own block on a transport, or one reduce-scatter."""
    if isinstance(transport, Collectives):
        return _WholeScatter(transport, produce, num_rows, "reduce_scatter", V)
    return Scatter(transport, op, produce, out, num_rows, choice)


def reducing(transport: Network, op: str, produce: Produce, out: Tensor, choice: Choice) -> Halves:
    """`exchange.Scatter` of all rows on a transport, or one all-reduce."""
    num_rows = out.shape[0]
    if isinstance(transport, Collectives):
        return _WholeScatter(transport, produce, num_rows, "all_reduce", transport.reduced)
    return Scatter(transport, op, produce, out, num_rows, choice)


def summing(
    transport: Network, op: str, addend: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """`exchange.Sum` on a transport, or one all-reduce."""
    if isinstance(transport, Collectives):
        return _WholeSum(transport, addend, consume)
    return Sum(transport, op, addend, consume, choice)


def _at_once() -> Steps[None]:
    yield from ()


@dataclass(frozen=True, slots=True)
class _WholeGather:
    network: Collectives
    shard: Tensor
    consume: Consume

    def start(self) -> Steps[None]:
        return _at_once()

    def finish(self) -> Steps[Tensor]:
        full = self.network.run("all_gather", V, R, self.shard)
        self.consume(slice(0, full.shape[0]), full)
        yield from _at_once()
        return full


@dataclass(frozen=True, slots=True)
class _WholeScatter:
    network: Collectives
    produce: Produce
    num_rows: int
    name: str
    dst: AxisType

    def start(self) -> Steps[None]:
        return _at_once()

    def finish(self) -> Steps[Tensor]:
        addend = self.produce(slice(0, self.num_rows))
        yield from _at_once()
        return self.network.run(self.name, Partial, self.dst, addend)


@dataclass(frozen=True, slots=True)
class _WholeSum:
    network: Collectives
    addend: Tensor
    consume: Consume

    def start(self) -> Steps[None]:
        return _at_once()

    def finish(self) -> Steps[Tensor]:
        total = self.network.run("all_reduce", Partial, R, self.addend)
        self.consume(slice(0, total.shape[0]), total)
        yield from _at_once()
        return total

"""Exchanges as one typed collective each, over all of the matrix: no chunks, no messages.

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
    """Typed collectives along some axes, in place of a kernel's transport or fused operators.

    Attributes:
        backend: Backend of the body.
        axes: Axes over which the kernel communicates.
        reduced: Type of the result of an all-reduce in the forward.
    """

    backend: Backend
    axes: tuple[str, ...]
    reduced: AxisType = R

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the axes."""
        return self.backend.mesh.num_ranks(self.axes)

    def charge(self, flops: float, traffic: float) -> None:
        """Does nothing: there is no clock."""

    def run(self, name: str, src: AxisType, dst: AxisType, x: Tensor, dim: int = 0) -> Tensor:
        """Runs the collective of that name and types, along `dim` if it has one."""
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
        """Runs the first half."""

    def finish(self) -> Steps[Tensor]:
        """Runs the second half; returns the gathered or summed matrix."""


def gathering(
    transport: Network, op: str, shard: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """Makes an `executor.Gather` on a transport, or one all-gather."""
    if isinstance(transport, Collectives):
        return _TypedGather(transport, shard, consume)
    return Gather(transport, op, shard, consume, choice)


def scattering(
    transport: Network, op: str, produce: Produce, out: Tensor, num_rows: int, choice: Choice
) -> Halves:
    """Makes an `executor.Scatter` of the own block on a transport, or one reduce-scatter."""
    if isinstance(transport, Collectives):
        return _TypedScatter(transport, produce, num_rows, "reduce_scatter", V)
    return Scatter(transport, op, produce, out, num_rows, choice)


def reducing(transport: Network, op: str, produce: Produce, out: Tensor, choice: Choice) -> Halves:
    """Makes an `executor.Scatter` of all rows on a transport, or one all-reduce."""
    num_rows = out.shape[0]
    if isinstance(transport, Collectives):
        return _TypedScatter(transport, produce, num_rows, "all_reduce", transport.reduced)
    return Scatter(transport, op, produce, out, num_rows, choice)


def summing(
    transport: Network, op: str, addend: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """Makes an `executor.Sum` on a transport, or one all-reduce."""
    if isinstance(transport, Collectives):
        return _TypedSum(transport, addend, consume)
    return Sum(transport, op, addend, consume, choice)


def _no_steps() -> Steps[None]:
    yield from ()


@dataclass(frozen=True, slots=True)
class _TypedGather:
    network: Collectives
    shard: Tensor
    consume: Consume

    def start(self) -> Steps[None]:
        return _no_steps()

    def finish(self) -> Steps[Tensor]:
        full = self.network.run("all_gather", V, R, self.shard)
        self.consume(slice(0, full.shape[0]), full)
        yield from _no_steps()
        return full


@dataclass(frozen=True, slots=True)
class _TypedScatter:
    network: Collectives
    produce: Produce
    num_rows: int
    name: str
    dst: AxisType

    def start(self) -> Steps[None]:
        return _no_steps()

    def finish(self) -> Steps[Tensor]:
        addend = self.produce(slice(0, self.num_rows))
        yield from _no_steps()
        return self.network.run(self.name, Partial, self.dst, addend)


@dataclass(frozen=True, slots=True)
class _TypedSum:
    network: Collectives
    addend: Tensor
    consume: Consume

    def start(self) -> Steps[None]:
        return _no_steps()

    def finish(self) -> Steps[Tensor]:
        total = self.network.run("all_reduce", Partial, R, self.addend)
        self.consume(slice(0, total.shape[0]), total)
        yield from _no_steps()
        return total

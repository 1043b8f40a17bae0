"""Exchanges as one typed collective each, over all of the matrix: no chunks, no messages.

With these in place of its transport a kernel is ordinary code of a body: the checker interprets
it, backward included, and on simulated ranks its formulas run as they are. Forward and backward of
the kernels know no difference.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeAlias

from torch import Tensor

from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.kernels.executor import (
    Choice,
    Consume,
    Gather,
    Produce,
    Scatter,
    Sum,
)
from shardmap_torch.kernels.transport import Steps, Transport
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


def complete(exchange: Halves) -> Steps[Tensor]:
    """Runs both halves, one after the other."""
    yield from exchange.start()
    return (yield from exchange.finish())


def gathering(
    transport: Network, op: str, shard: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """Makes an `executor.Gather` on a transport, or one all-gather."""
    if isinstance(transport, Collectives):
        return _AtOnce(partial(transport.run, "all_gather", V, R, shard), consume)
    return Gather(transport, op, shard, consume, choice)


def scattering(
    transport: Network, op: str, produce: Produce, out: Tensor, num_rows: int, choice: Choice
) -> Halves:
    """Makes an `executor.Scatter` of the own block on a transport, or one reduce-scatter."""
    if isinstance(transport, Collectives):
        return _AtOnce(
            lambda: transport.run("reduce_scatter", Partial, V, produce(slice(0, num_rows)))
        )
    return Scatter(transport, op, produce, out, num_rows, choice)


def reducing(transport: Network, op: str, produce: Produce, out: Tensor, choice: Choice) -> Halves:
    """Makes an `executor.Scatter` of all rows on a transport, or one all-reduce."""
    num_rows = out.shape[0]
    if isinstance(transport, Collectives):
        dst = transport.reduced
        return _AtOnce(
            lambda: transport.run("all_reduce", Partial, dst, produce(slice(0, num_rows)))
        )
    return Scatter(transport, op, produce, out, num_rows, choice)


def summing(
    transport: Network, op: str, addend: Tensor, consume: Consume, choice: Choice
) -> Halves:
    """Makes an `executor.Sum` on a transport, or one all-reduce."""
    if isinstance(transport, Collectives):
        return _AtOnce(partial(transport.run, "all_reduce", Partial, R, addend), consume)
    return Sum(transport, op, addend, consume, choice)


@dataclass(frozen=True, slots=True)
class _AtOnce:
    """An exchange that is one collective, in its second half."""

    collective: Callable[[], Tensor]
    consume: Consume | None = None

    def start(self) -> Steps[None]:
        yield from ()

    def finish(self) -> Steps[Tensor]:
        yield from ()
        matrix = self.collective()
        if self.consume is not None:
            self.consume(slice(0, matrix.shape[0]), matrix)
        return matrix

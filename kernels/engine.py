"""Engines that multiply and communicate: schedules on a transport, or torch's fused operators."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final, Protocol

from torch import Tensor

from shardmap_torch.kernels.algorithms import (
    gather_backward,
    gather_backward_again,
    gather_forward,
    reduce_backward,
    reduce_forward,
    scatter_backward,
    scatter_forward,
)
from shardmap_torch.kernels.network import Network
from shardmap_torch.kernels.planner import Plan, Problem, decide
from shardmap_torch.kernels.planning.cost import Fabric
from shardmap_torch.kernels.transports.executor import Choice
from shardmap_torch.kernels.transports.protocol import run

CHECKED: Final = "the body is being checked, not run"


class Engine(Protocol):
    """Runs the two operations that gather or scatter, and their backward passes.

    `dim` is the dim that is cut; `choice` is one that `plan` made.
    """

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Plans whether and how it runs, with the reason."""

    def gather(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dim: int,
        choice: Choice,
    ) -> tuple[list[Tensor], Tensor]:
        """The products with the gathered x, and its cut matrix."""

    def gather_backward(
        self,
        x: Tensor,
        gathered: Tensor | None,
        ws: Sequence[Tensor],
        dys: Sequence[Tensor],
        needs_grad: Sequence[bool],
        dim: int,
        choice: Choice,
        again: Choice,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """(dx, the wanted dws); `again` gathers x where it was not kept."""

    def scatter(self, x: Tensor, w: Tensor, dim: int, choice: Choice) -> Tensor:
        """This rank's block of the sum of x @ w."""

    def scatter_backward(
        self,
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        needs_grad: tuple[bool, bool],
        dim: int,
        choice: Choice,
    ) -> tuple[Tensor | None, Tensor | None]:
        """The wanted of (dx, dw)."""


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Our schedules, and the one engine that has an all-reduce.

    Attributes:
        transport: This rank's end of the network.
        note: What every plan adds to its reason.
    """

    transport: Network
    note: str = ""

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Plans by the cost model."""
        plan = decide(problem, fabric, chunks, forced=forced)
        return replace(plan, reason=f"{plan.reason}; {self.note}") if self.note else plan

    def gather(
        self,
        x: Tensor,
        ws: Sequence[Tensor],
        biases: Sequence[Tensor | None],
        dim: int,
        choice: Choice,
    ) -> tuple[list[Tensor], Tensor]:
        """Multiplies chunks as they arrive."""
        return run(gather_forward(self.transport, x, ws, biases, dim, choice))

    def gather_backward(
        self,
        x: Tensor,
        gathered: Tensor | None,
        ws: Sequence[Tensor],
        dys: Sequence[Tensor],
        needs_grad: Sequence[bool],
        dim: int,
        choice: Choice,
        again: Choice,
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Reduce-scatters dx under the weight gradients."""
        t = self.transport
        if gathered is not None or not any(needs_grad):
            return run(gather_backward(t, gathered, ws, dys, needs_grad, dim, choice))
        return run(gather_backward_again(t, x, ws, dys, needs_grad, dim, choice, again))

    def scatter(self, x: Tensor, w: Tensor, dim: int, choice: Choice) -> Tensor:
        """Sends chunks as they are made."""
        return run(scatter_forward(self.transport, x, w, dim, choice))

    def scatter_backward(
        self,
        x: Tensor,
        w: Tensor,
        dy: Tensor,
        needs_grad: tuple[bool, bool],
        dim: int,
        choice: Choice,
    ) -> tuple[Tensor | None, Tensor | None]:
        """One gather of dy feeds both."""
        return run(scatter_backward(self.transport, x, w, dy, needs_grad, dim, choice))

    def reduce(self, x: Tensor, w: Tensor, choice: Choice) -> Tensor:
        """The sum of x @ w, of which every rank has an addend."""
        return run(reduce_forward(self.transport, x, w, choice))

    def reduce_backward(
        self, x: Tensor, w: Tensor, dy: Tensor, needs_grad: tuple[bool, bool], choice: Choice
    ) -> tuple[Tensor | None, Tensor | None]:
        """The wanted of (dx, dw) where the ranks' cotangents add up."""
        return run(reduce_backward(self.transport, x, w, dy, needs_grad, choice))


@dataclass(frozen=True, slots=True)
class Typed(Scheduled):
    """The kernels' formulas on typed collectives, as a body that is checked has them."""

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Any; there are no chunks."""
        return Plan(problem.op, problem.axis, Choice(problem.schedules[0], 1), CHECKED)

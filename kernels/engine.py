"""The engine that runs the kernels' operations by our schedules on a transport."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

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
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import Fabric, Plan, Problem, decide
from shardmap_torch.kernels.symmetric import Symmetric
from shardmap_torch.kernels.transport import Transport, run


@dataclass(frozen=True, slots=True)
class Scheduled:
    """Runs our schedules; the only engine that has an all-reduce.

    Its methods take what the functions of `algorithms` take, a choice of `plan` among it.

    Attributes:
        transport: This rank's end of the network.
        note: Text that every plan adds to its reason.
    """

    transport: Transport
    note: str = ""

    def plan(
        self, problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
    ) -> Plan:
        """Decides by the cost model if the call overlaps, and in how many parts."""
        plan = decide(problem, fabric, chunks, forced=forced)
        return replace(plan, reason=f"{plan.reason}; {self.note}") if self.note else plan

    def gather(self, *operands: Any) -> tuple[list[Tensor], Tensor]:
        """Computes `gather_forward`: the products with the gathered x, and its chunked matrix."""
        return run(gather_forward(self.transport, *operands))

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
        """Returns dx and the needed dws; `again` gathers x where it was not kept."""
        t = self.transport
        if gathered is not None or not any(needs_grad):
            return run(gather_backward(t, gathered, ws, dys, needs_grad, dim, choice))
        return run(gather_backward_again(t, x, ws, dys, needs_grad, dim, choice, again))

    def scatter(self, *operands: Any) -> Tensor:
        """Computes `scatter_forward`: this rank's block of the sum of x @ w."""
        return run(scatter_forward(self.transport, *operands))

    def scatter_backward(self, *operands: Any) -> tuple[Tensor | None, Tensor | None]:
        """Computes `scatter_backward`: the needed (dx, dw), from one gather of dy."""
        return run(scatter_backward(self.transport, *operands))

    def reduce(self, *operands: Any) -> Tensor:
        """Computes `reduce_forward`: the sum over the ranks of x @ w."""
        return run(reduce_forward(self.transport, *operands))

    def reduce_backward(self, *operands: Any) -> tuple[Tensor | None, Tensor | None]:
        """Computes `reduce_backward`: the needed (dx, dw), whose cotangents have to be summed."""
        return run(reduce_backward(self.transport, *operands))


Engine: TypeAlias = Scheduled | Symmetric

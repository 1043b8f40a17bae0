"""The kernels under autograd: one Function, and an operation for each kernel, forward or backward.

The backward of an operation is an operation again, overlapped like the first; a backward of a
backward differentiates the unfused composition, whose derivatives of every order are those of the
collectives. Nothing here reads ambient state: backward may run after the body has ended.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.collectives.autograd import TypedFunction, bind
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.kernels.algorithms import ChunkedDim, as_matrix
from shardmap_torch.kernels.engine import Engine, Scheduled
from shardmap_torch.kernels.planner import (
    Family,
    Options,
    Problem,
    backward_schedules,
    record,
)
from shardmap_torch.kernels.planning.cost import Fabric
from shardmap_torch.kernels.transports.executor import Choice
from shardmap_torch.ops.arguments import shown
from shardmap_torch.types import R

Operands: TypeAlias = Sequence[Tensor | None]


class Operation(Protocol):
    """A kernel, or its backward, without its tensors."""

    @property
    def num_kept(self) -> int:
        """Trailing results of `run` that only its backward reads."""

    def run(self, *operands: Any) -> tuple[Tensor, ...]:
        """The overlapped kernel, on plain tensors."""

    def pull_back(self, operands: Operands, needed: Sequence[bool], grads: Operands) -> Operands:
        """The gradients that are needed, one for each operand; `operands` end in what was kept."""


class Overlapped(TypedFunction):
    """Any operation under reverse-mode autograd and torch.func.grad."""

    @staticmethod
    def forward(operation: Operation, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Runs the kernel."""
        return operation.run(*operands)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        """Keeps the operands and what the kernel keeps for its backward."""
        operation, *operands = inputs
        ctx.set_materialize_grads(False)
        kept = output[len(output) - operation.num_kept :]
        ctx.mark_non_differentiable(*kept)
        ctx.operation = operation
        ctx.save_for_backward(*operands, *kept)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        """Pulls cotangents back; without any, there is no communication."""
        if all(grad is None for grad in grads):
            return (None,) * len(ctx.needs_input_grad)
        operation: Operation = ctx.operation
        return (None, *operation.pull_back(ctx.saved_tensors, ctx.needs_input_grad[1:], grads))


def overlapped(operation: Operation, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """The results of an operation, without what it keeps for its backward."""
    results: tuple[Tensor, ...] = Overlapped.apply(operation, *operands)
    return results[: len(results) - operation.num_kept]


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one public operation, without its tensors."""

    backend: Backend
    engine: Engine
    fabric: Callable[[torch.dtype], Fabric]
    collective: Collective
    choice: Choice
    options: Options

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """`all_gather(x) @ w + bias` for each w."""
        return overlapped(GatherMatmul(self, len(ws)), x, *ws, *biases)

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        """`reduce_scatter(x @ w)`."""
        return overlapped(MatmulScatter(self), x, w)[0]

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """`all_reduce(x @ w)`."""
        return overlapped(MatmulReduce(self), x, w)[0]

    @property
    def num_ranks(self) -> int:
        """Ranks on the axes."""
        return self.backend.mesh.num_ranks(self.collective.axes)

    @property
    def scheduled(self) -> Scheduled:
        """The engine of an all-reduce, for which symmetric memory has no operator."""
        assert isinstance(self.engine, Scheduled)
        return self.engine

    def backward_choice(self, op: str, family: Family, dtype: torch.dtype, **size: Any) -> Choice:
        """Plans the backward: always the kernel, in as many parts as the cost model finds best.

        `size` is what a `Problem` says of rows, bytes, flops and passes.
        """
        problem = Problem(
            op=op,
            axis=shown(self.collective.axes),
            num_ranks=self.num_ranks,
            schedules=backward_schedules(family, self.options.schedule),
            **size,
        )
        asked = self.options.chunks
        chunks = None if asked is None else min(asked, problem.block_rows)
        plan = self.engine.plan(problem, partial(self.fabric, dtype), chunks, forced=True)
        choice = record(plan).choice
        assert choice is not None
        return choice


class Runner(Protocol):
    """Runs one public operation on any tensors."""

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """`all_gather(x) @ w + bias` for each w."""

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        """`reduce_scatter(x @ w)`."""

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """`all_reduce(x @ w)`."""


def block_rows(block: Tensor, dim: int) -> int:
    """Rows of a rank's block as a cut matrix."""
    by_features = ChunkedDim.of(dim, block.ndim).by_features
    return block.shape[-1] if by_features else block.shape[:-1].numel()


@dataclass(frozen=True, slots=True)
class Unfused:
    """The compositions."""

    backend: Backend
    collective: Collective

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """One all-gather, then the matmuls."""
        return gather_unfused(self.backend, self.collective, x, ws, biases)

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        """The matmul, then one reduce-scatter."""
        return reduce_unfused(self.backend, self.collective, x, w)

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """The matmul, then one all-reduce."""
        return reduce_unfused(self.backend, self.collective, x, w)


def gather_unfused(
    backend: Backend, collective: Collective, x: Tensor, ws: Sequence[Tensor], biases: Operands
) -> tuple[Tensor, ...]:
    """One all-gather, then the matmuls."""
    full = bind(backend, collective, x)
    return tuple(
        full @ w if bias is None else full @ w + bias for w, bias in zip(ws, biases, strict=True)
    )


def reduce_unfused(backend: Backend, collective: Collective, x: Tensor, w: Tensor) -> Tensor:
    """One matmul, then the reduce-scatter or all-reduce."""
    return bind(backend, collective, x @ w)


def _differentiate(
    composition: Callable[..., tuple[Tensor, ...]], primals: Sequence[Tensor], grads: Operands
) -> tuple[Tensor, ...]:
    """Gradients of a composition, themselves differentiable to any order."""
    outs, pull_back, *_ = torch.func.vjp(composition, *primals)
    cotangents = tuple(
        torch.zeros_like(out) if grad is None else grad
        for out, grad in zip(outs, grads, strict=True)
    )
    pulled: tuple[Tensor, ...] = pull_back(cotangents)
    return pulled


@dataclass(frozen=True, slots=True)
class GatherMatmul:
    """`all_gather(x) @ w + bias`: operands x, the weights, their biases or None."""

    call: Call
    num_weights: int

    @property
    def num_kept(self) -> int:
        """The gathered x, unless it is to be gathered again."""
        return int(self.call.options.save_gathered)

    def run(self, x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        """The products, and what is kept."""
        call, ws, biases = self.call, operands[: self.num_weights], operands[self.num_weights :]
        outs, gathered = call.engine.gather(x, ws, biases, call.collective.dim, call.choice)
        return (*outs, gathered) if self.num_kept else tuple(outs)

    def pull_back(self, operands: Operands, needed: Sequence[bool], grads: Operands) -> Operands:
        """(dx, *dws, *dbiases); an output without a cotangent takes no part."""
        count = self.num_weights
        x, gathered = operands[0], operands[-1] if self.num_kept else None
        dys = {i: dy for i, dy in enumerate(grads[:count]) if dy is not None}
        needs_grad = (needed[0], *(needed[1 + i] for i in dys))
        ws = [operands[1 + i] for i in dys]
        found = _only_needed(
            GatherMatmulBackward(self.call, needs_grad), needs_grad, x, gathered, *ws, *dys.values()
        )
        result: list[Tensor | None] = [None] * (1 + 2 * count)
        result[0] = found[0]
        for (i, dy), dw in zip(dys.items(), found[1:], strict=True):
            result[1 + i] = dw
            if needed[1 + count + i]:
                result[1 + count + i] = as_matrix(dy).sum(0)
        return result


def _only_needed(
    operation: Operation, needs_grad: Sequence[bool], *operands: Tensor | None
) -> list[Tensor | None]:
    """The gradients that an operation computes, None in place of those that it does not."""
    found = iter(overlapped(operation, *operands) if any(needs_grad) else ())
    return [next(found) if want else None for want in needs_grad]


def _selected(gradients: Operands, needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    pairs = zip(gradients, needs_grad, strict=True)
    return tuple(grad for grad, want in pairs if want and grad is not None)


@dataclass(frozen=True, slots=True)
class GatherMatmulBackward:
    """The wanted of (dx, *dws): operands x, its gathered cut matrix or None, the ws, the dys."""

    call: Call
    needs_grad: tuple[bool, ...]
    num_kept: ClassVar[int] = 0

    def run(self, x: Tensor, gathered: Tensor | None, *rest: Any) -> tuple[Tensor, ...]:
        """Reduce-scatters dx under the weight gradients."""
        call = self.call
        needs_dx, *needs_grad = self.needs_grad
        ws, dys = rest[: len(needs_grad)], rest[len(needs_grad) :]
        dim = call.collective.dim
        if not needs_dx:
            return self._weights_only(x, gathered, dys, needs_grad)
        flops = sum(2.0 * dy.numel() * w.shape[0] for dy, w in zip(dys, ws, strict=True))
        scatter = call.backward_choice(
            "all_gather_matmul backward",
            "scatter",
            x.dtype,
            block_rows=block_rows(x, dim),
            block_bytes=x.nbytes,
            flops=flops,
            tail_flops=flops * any(needs_grad),
        )
        again = Choice(call.choice.schedule, scatter.num_parts)
        dx, dws = call.engine.gather_backward(x, gathered, ws, dys, needs_grad, dim, scatter, again)
        return _selected((dx, *dws), self.needs_grad)

    def _weights_only(
        self, x: Tensor, gathered: Tensor | None, dys: Sequence[Tensor], needs_grad: Sequence[bool]
    ) -> tuple[Tensor, ...]:
        chunked = ChunkedDim.of(self.call.collective.dim, x.ndim)
        if gathered is None:
            gathered = chunked.matrix(self.call.collective.run(self.call.backend, x))
        left = chunked.flip(gathered).t()
        return tuple(
            left @ chunked.tokens(dy) for dy, want in zip(dys, needs_grad, strict=True) if want
        )

    def _composition(self, x: Tensor, *rest: Tensor) -> tuple[Tensor, ...]:
        count = len(self.needs_grad) - 1
        ws, dys = rest[:count], rest[count:]

        def products(x: Tensor, *ws: Tensor) -> tuple[Tensor, ...]:
            return gather_unfused(self.call.backend, self.call.collective, x, ws, [None] * count)

        return _selected(_differentiate(products, (x, *ws), dys), self.needs_grad)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """Differentiates the composition; the gathered x is no variable of its own."""
        x, _, *rest = operands
        dx, *others = _differentiate(self._composition, (x, *rest), grads)
        return dx, None, *others


@dataclass(frozen=True, slots=True)
class MatmulScatter:
    """`reduce_scatter(x @ w)`: operands x and w."""

    call: Call
    num_kept: ClassVar[int] = 0

    def run(self, x: Tensor, w: Tensor) -> tuple[Tensor]:
        """This rank's block of the sum."""
        call = self.call
        return (call.engine.scatter(x, w, call.collective.dim, call.choice),)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """One gather of dy feeds both gradients."""
        needs_grad = (needed[0], needed[1])
        return _only_needed(
            MatmulScatterBackward(self.call, needs_grad), needs_grad, *operands, *grads
        )


@dataclass(frozen=True, slots=True)
class MatmulReduce:
    """`all_reduce(x @ w)`: operands x and w."""

    call: Call
    num_kept: ClassVar[int] = 0

    def run(self, x: Tensor, w: Tensor) -> tuple[Tensor]:
        """The sum."""
        return (self.call.scheduled.reduce(x, w, self.call.choice),)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """For R the cotangents are summed, and each chunk of the sum feeds both; for I none is."""
        needs_grad = (needed[0], needed[1])
        if self.call.collective.dst is R:
            return _only_needed(
                MatmulReduceBackward(self.call, needs_grad), needs_grad, *operands, *grads
            )
        x, w = operands
        dz = bind(self.call.backend, self.call.collective.transpose, grads[0])  # type: ignore[arg-type]
        dx = dz @ w.t() if needs_grad[0] else None
        dw = as_matrix(x).t() @ as_matrix(dz) if needs_grad[1] else None
        return dx, dw


@dataclass(frozen=True, slots=True)
class _ProductBackward:
    """The wanted of (dx, dw) of a collective of x @ w: operands x, w and the cotangent."""

    call: Call
    needs_grad: tuple[bool, bool]
    num_kept: ClassVar[int] = 0

    def _composition(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        def product(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (reduce_unfused(self.call.backend, self.call.collective, x, w),)

        return _selected(_differentiate(product, (x, w), (dy,)), self.needs_grad)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """Differentiates the composition."""
        return _differentiate(self._composition, operands, grads)

    def _flops(self, x: Tensor, w: Tensor) -> float:
        return 2.0 * x.numel() * w.shape[1] * sum(self.needs_grad)


class MatmulScatterBackward(_ProductBackward):
    """Of `reduce_scatter(x @ w)`."""

    def run(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """One gather of dy feeds both gradients."""
        call, dim = self.call, self.call.collective.dim
        choice = call.backward_choice(
            "matmul_reduce_scatter backward",
            "gather",
            x.dtype,
            block_rows=block_rows(dy, dim),
            block_bytes=dy.nbytes,
            flops=self._flops(x, w),
        )
        gradients = call.engine.scatter_backward(x, w, dy, self.needs_grad, dim, choice)
        return _selected(gradients, self.needs_grad)


class MatmulReduceBackward(_ProductBackward):
    """Of `all_reduce(x @ w)` where the ranks use the result in different ways."""

    def run(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """One all-reduce of dy feeds both gradients."""
        call = self.call
        num_ranks = call.num_ranks
        choice = call.backward_choice(
            "matmul_all_reduce backward",
            "sum",
            x.dtype,
            block_rows=max(1, dy.shape[:-1].numel() // num_ranks),
            block_bytes=dy.nbytes / num_ranks,
            flops=self._flops(x, w),
            passes=2,
        )
        gradients = call.scheduled.reduce_backward(x, w, dy, self.needs_grad, choice)
        return _selected(gradients, self.needs_grad)

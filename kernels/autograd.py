"""Autograd of the kernels: one Function, and an operation for each kernel, forward or backward.

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

from shardmap_torch.backends.products import multiply, multiply_and_sum
from shardmap_torch.collectives.autograd import TypedFunction, bind
from shardmap_torch.collectives.operations import Collective, Planned
from shardmap_torch.collectives.protocol import Backend
from shardmap_torch.core.functorch import is_transformed_otherwise, reject_batched_gradients
from shardmap_torch.kernels.algorithms import (
    ChunkedDim,
    as_matrix,
    gather_backward,
    gather_forward,
    product_backward,
    reduce_forward,
    scatter_forward,
)
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import Fabric, Options, Problem, decide, record
from shardmap_torch.kernels.transport import Transport, run
from shardmap_torch.ops.arguments import shown
from shardmap_torch.types import I

Operands: TypeAlias = Sequence[Tensor | None]


class Operation(Protocol):
    """A kernel, or its backward, without its tensors."""

    @property
    def num_kept(self) -> int:
        """Number of trailing results of `run` that only its backward reads."""

    def run(self, *operands: Any) -> tuple[Tensor, ...]:
        """Runs the overlapped kernel on plain tensors."""

    def pull_back(self, operands: Operands, needed: Sequence[bool], grads: Operands) -> Operands:
        """Computes the needed gradients, one for each operand; `operands` end in what was kept."""


class BackwardOperation(Operation, Protocol):
    """The backward of a kernel."""

    def unfused(self, *operands: Any) -> tuple[Tensor, ...]:
        """Runs the backward of the unfused composition in its place."""


class Overlapped(TypedFunction):
    """Autograd Function of any operation, also under torch.func.grad."""

    @staticmethod
    def forward(operation: Operation, *operands: Tensor | None) -> tuple[Tensor, ...]:
        """Runs the kernel.

        Its results are views, whose bases autograd must not see: it would refuse writes into them.
        """
        return tuple(y.data for y in operation.run(*operands))

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
        reject_batched_gradients()
        operation: Operation = ctx.operation
        return (None, *operation.pull_back(ctx.saved_tensors, ctx.needs_input_grad[1:], grads))


def overlapped(operation: Operation, *operands: Tensor | None) -> tuple[Tensor, ...]:
    """Runs an operation under autograd; returns its results without what it keeps for backward."""
    results: tuple[Tensor, ...] = Overlapped.apply(operation, *operands)
    return results[: len(results) - operation.num_kept]


@dataclass(frozen=True, slots=True)
class KernelCall:
    """One call of one public operation, without its tensors."""

    backend: Backend
    transport: Transport
    fabric: Callable[[torch.dtype], Fabric]
    collective: Collective
    choice: Choice
    options: Options

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """Computes `all_gather(x) @ w + bias` for each w."""
        return overlapped(GatherMatmul(self, len(ws)), x, *ws, *biases)

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """Computes the reduce-scatter or all-reduce of `x @ w`."""
        return overlapped(MatmulReduce(self), x, w)[0]

    @property
    def scatters(self) -> bool:
        """Returns whether the sum of a product is scattered, and not kept by all ranks."""
        return self.collective.name == "reduce_scatter"

    @property
    def unfused(self) -> "Unfused":
        """The unfused composition of the same call."""
        return Unfused(self.backend, self.collective)

    @property
    def num_ranks(self) -> int:
        """Number of ranks on the axes."""
        return self.backend.mesh.num_ranks(self.collective.axes)

    def backward_choice(self, op: str, schedule: str, dtype: torch.dtype, **size: Any) -> Choice:
        """Plans the backward: always the kernel, in as many parts as the cost model picks.

        `size` has the fields of `Problem` for rows, bytes, flops and passes.
        """
        problem = Problem(
            op=op,
            axis=shown(self.collective.axes),
            num_ranks=self.num_ranks,
            schedule=schedule,
            **size,
        )
        requested = self.options.chunks
        chunks = None if requested is None else min(requested, problem.block_rows)
        plan = decide(problem, partial(self.fabric, dtype), chunks, forced=True)
        choice = record(plan).choice
        assert choice is not None
        return choice


def block_rows(block: Tensor, dim: int) -> int:
    """Counts the rows of a rank's block as a chunked matrix."""
    by_features = ChunkedDim.of(dim, block.ndim).by_features
    return block.shape[-1] if by_features else block.shape[:-1].numel()


@dataclass(frozen=True, slots=True)
class Unfused:
    """Runs the unfused compositions."""

    backend: Backend
    collective: Collective | Planned

    def gather(self, x: Tensor, ws: Sequence[Tensor], biases: Operands) -> tuple[Tensor, ...]:
        """Runs one all-gather, then the matmuls."""
        full = bind(self.backend, self.collective, x)
        outs = []
        for w, bias in zip(ws, biases, strict=True):
            y = multiply(self.backend, full, w)
            outs.append(y if bias is None else y + bias)
        return tuple(outs)

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """Runs the matmul, then the reduce-scatter or all-reduce."""
        return multiply_and_sum(self.backend, self.collective, x, w)


def _differentiate(
    composition: Callable[..., tuple[Tensor, ...]], primals: Sequence[Tensor], grads: Operands
) -> tuple[Tensor, ...]:
    """Computes the gradients of a composition, differentiable to any order."""
    outs, pull_back, *_ = torch.func.vjp(composition, *primals)
    cotangents = tuple(
        torch.zeros_like(out) if grad is None else grad
        for out, grad in zip(outs, grads, strict=True)
    )
    gradients: tuple[Tensor, ...] = pull_back(cotangents)
    return gradients


@dataclass(frozen=True, slots=True)
class GatherMatmul:
    """Operation `all_gather(x) @ w + bias`: operands x, the weights, their biases or None."""

    call: KernelCall
    num_weights: int

    @property
    def num_kept(self) -> int:
        """1 for the gathered x, or 0 if the backward gathers it again."""
        return int(self.call.options.save_gathered)

    def run(self, x: Tensor, *operands: Any) -> tuple[Tensor, ...]:
        """Returns the products, then the gathered x if it is kept."""
        call, ws, biases = self.call, operands[: self.num_weights], operands[self.num_weights :]
        dim, choice = call.collective.dim, call.choice
        outs, gathered = run(gather_forward(call.transport, x, ws, biases, dim, choice))
        return (*outs, gathered) if self.num_kept else tuple(outs)

    def pull_back(self, operands: Operands, needed: Sequence[bool], grads: Operands) -> Operands:
        """Returns (dx, *dws, *dbiases); an output without a cotangent is skipped."""
        count = self.num_weights
        x, gathered = operands[0], operands[-1] if self.num_kept else None
        dys = {i: dy for i, dy in enumerate(grads[:count]) if dy is not None}
        needs_grad = (needed[0], *(needed[1 + i] for i in dys))
        ws = [operands[1 + i] for i in dys]
        gradients = _only_needed(
            GatherMatmulBackward(self.call, needs_grad), needs_grad, x, gathered, *ws, *dys.values()
        )
        result: list[Tensor | None] = [None] * (1 + 2 * count)
        result[0] = gradients[0]
        for (i, dy), dw in zip(dys.items(), gradients[1:], strict=True):
            result[1 + i] = dw
            if needed[1 + count + i]:
                result[1 + count + i] = as_matrix(dy).sum(0)
        return result


def _only_needed(
    operation: BackwardOperation, needs_grad: Sequence[bool], *operands: Tensor | None
) -> list[Tensor | None]:
    """Runs a backward operation; returns None in place of the gradients it does not compute.

    Under other transforms than gradients, such as the vmap of jacrev, it is the composition's.
    """
    if not any(needs_grad):
        return [None] * len(needs_grad)
    run = operation.unfused if is_transformed_otherwise() else partial(overlapped, operation)
    gradients = iter(run(*operands))
    return [next(gradients) if needed else None for needed in needs_grad]


def _selected(gradients: Operands, needs_grad: Sequence[bool]) -> tuple[Tensor, ...]:
    pairs = zip(gradients, needs_grad, strict=True)
    return tuple(grad for grad, needed in pairs if needed and grad is not None)


@dataclass(frozen=True, slots=True)
class GatherMatmulBackward:
    """Operation that computes the needed gradients of (dx, *dws) of `GatherMatmul`.

    Operands: x, its gathered chunked matrix or None, the weights, their cotangents.
    """

    call: KernelCall
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
            "scatter/direct",
            x.dtype,
            block_rows=block_rows(x, dim),
            block_bytes=x.nbytes,
            flops=flops,
            tail_flops=flops * any(needs_grad),
        )
        again = Choice(call.choice.schedule, scatter.num_parts)
        operands = x, gathered, ws, dys, needs_grad, dim, scatter, again
        dx, dws = run(gather_backward(call.transport, *operands))
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
            return self.call.unfused.gather(x, ws, [None] * count)

        return _selected(_differentiate(products, (x, *ws), dys), self.needs_grad)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """Differentiates the composition; the gathered x, which depends on x, gets no gradient."""
        x, _, *rest = operands
        dx, *others = _differentiate(self._composition, (x, *rest), grads)
        return dx, None, *others

    def unfused(self, x: Tensor, gathered: Tensor | None, *rest: Tensor) -> tuple[Tensor, ...]:
        """Gathers x again, even if it was kept."""
        return self._composition(x, *rest)


@dataclass(frozen=True, slots=True)
class MatmulReduce:
    """Operation `reduce_scatter(x @ w)` or `all_reduce(x @ w)`: operands x and w."""

    call: KernelCall
    num_kept: ClassVar[int] = 0

    def run(self, x: Tensor, w: Tensor) -> tuple[Tensor]:
        """Returns the sum, or this rank's block of it."""
        call = self.call
        if call.scatters:
            dim = call.collective.dim
            return (run(scatter_forward(call.transport, x, w, dim, call.choice)),)
        return (run(reduce_forward(call.transport, x, w, call.choice)),)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        """Gathers or sums cotangents, chunk by chunk; of an I they are equal, nothing is sent."""
        needs_grad = (needed[0], needed[1])
        if self.call.collective.dst is not I:
            backward = MatmulReduceBackward(self.call, needs_grad)
            return _only_needed(backward, needs_grad, *operands, *grads)
        x, w = operands
        dz = bind(self.call.backend, self.call.collective.transpose, grads[0])  # type: ignore[arg-type]
        dx = dz @ w.t() if needs_grad[0] else None
        dw = as_matrix(x).t() @ as_matrix(dz) if needs_grad[1] else None
        return dx, dw


@dataclass(frozen=True, slots=True)
class MatmulReduceBackward:
    """Operation that computes the needed gradients (dx, dw) of `MatmulReduce`.

    Operands: x, w and the cotangent, which all ranks need, gathered or summed.
    """

    call: KernelCall
    needs_grad: tuple[bool, bool]
    num_kept: ClassVar[int] = 0

    def run(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """Computes both gradients from one gather or all-reduce of dy."""
        call = self.call
        flops = 2.0 * x.numel() * w.shape[1] * sum(self.needs_grad)
        size: dict[str, Any]
        if call.scatters:
            op, schedule, dim = "matmul_reduce_scatter", "gather/ring", call.collective.dim
            size = {"block_rows": block_rows(dy, dim), "block_bytes": dy.nbytes}
        else:
            op, schedule, dim = "matmul_all_reduce", "sum/direct", None
            rows = max(1, dy.shape[:-1].numel() // call.num_ranks)
            size = {"block_rows": rows, "block_bytes": dy.nbytes / call.num_ranks, "passes": 2}
        choice = call.backward_choice(f"{op} backward", schedule, x.dtype, flops=flops, **size)
        operands = x, w, dy, self.needs_grad, dim, choice
        return _selected(run(product_backward(call.transport, *operands)), self.needs_grad)

    def unfused(self, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, ...]:
        """Differentiates the product and its collective."""

        def product(x: Tensor, w: Tensor) -> tuple[Tensor]:
            return (self.call.unfused.reduce(x, w),)

        return _selected(_differentiate(product, (x, w), (dy,)), self.needs_grad)

    def pull_back(self, operands: Any, needed: Sequence[bool], grads: Operands) -> Operands:
        return _differentiate(self.unfused, operands, grads)

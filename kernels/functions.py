"""The kernels under autograd: backward passes that overlap, and their unfused compositions.

Each Function has one call description, `Call`, and reads no ambient state: backward may run after
the body has ended. A backward that is itself differentiated runs the unfused composition, whose
derivatives of every order are those of the collectives.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.backend import Backend
from shardmap_torch.kernels.endpoint import Endpoint
from shardmap_torch.kernels.exchange import Choice
from shardmap_torch.kernels.matmul import (
    Cut,
    gather_backward,
    gather_backward_again,
    gather_forward,
    reduce_forward,
    scatter_backward,
    scatter_forward,
)
from shardmap_torch.kernels.plan import Problem, decide, record
from shardmap_torch.kernels.transport import run
from shardmap_torch.ops.arguments import shown
from shardmap_torch.rule import Collective, bind


@dataclass(frozen=True, slots=True)
class Call:
    """One call of one operation, without its tensors."""

    backend: Backend
    endpoint: Endpoint
    collective: Collective
    choice: Choice
    chunks: int | None = None
    save_gathered: bool = True

    def gather(
        self, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None]
    ) -> tuple[Tensor, ...]:
        """`all_gather(x) @ w + bias` for each w."""
        outs: tuple[Tensor, ...] = GatherMatmul.apply(self, len(ws), x, *ws, *biases)  # type: ignore[no-untyped-call]
        return outs

    def scatter(self, x: Tensor, w: Tensor) -> Tensor:
        """`reduce_scatter(x @ w)`."""
        out: Tensor = MatmulScatter.apply(self, x, w)  # type: ignore[no-untyped-call]
        return out

    def reduce(self, x: Tensor, w: Tensor) -> Tensor:
        """`all_reduce(x @ w)`."""
        out: Tensor = MatmulReduce.apply(self, x, w)  # type: ignore[no-untyped-call]
        return out

    def backward_choice(
        self,
        op: str,
        schedule: str,
        block: Tensor,
        flops: float,
        tail_flops: float = 0.0,
    ) -> Choice:
        """How the backward runs: always the kernel, in as many parts as the model finds best."""
        transport = self.endpoint.transport
        rows = block_rows(block, self.collective.dim)
        problem = Problem(
            op=op,
            axis=shown(self.collective.axes),
            num_ranks=transport.num_ranks,
            schedule=schedule,
            block_rows=rows,
            block_bytes=block.nbytes,
            flops=flops,
            tail_flops=tail_flops,
        )
        chunks = None if self.chunks is None else min(self.chunks, rows)
        plan = decide(problem, partial(self.endpoint.fabric, block.dtype), chunks, forced=True)
        choice = record(plan).choice
        assert choice is not None
        return choice


def block_rows(block: Tensor, dim: int) -> int:
    """Rows of a rank's block as a cut matrix."""
    by_features = Cut.of(dim, block.ndim).by_features
    return block.shape[-1] if by_features else block.shape[:-1].numel()


def gather_unfused(
    backend: Backend,
    collective: Collective,
    x: Tensor,
    ws: Sequence[Tensor],
    biases: Sequence[Tensor | None],
) -> tuple[Tensor, ...]:
    """One all-gather, then the matmuls."""
    full = bind(backend, collective, x)
    return tuple(
        full @ w if bias is None else full @ w + bias for w, bias in zip(ws, biases, strict=True)
    )


def reduce_unfused(backend: Backend, collective: Collective, x: Tensor, w: Tensor) -> Tensor:
    """One matmul, then the reduce-scatter or all-reduce."""
    return bind(backend, collective, x @ w)


def _differentiable(
    composition: Callable[..., tuple[Tensor, ...]],
    inputs: Sequence[Tensor | None],
    needed: Sequence[bool],
    grads: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Gradients of the unfused composition, with a graph of their own."""
    outs = composition(*inputs)
    pairs = [(out, grad) for out, grad in zip(outs, grads, strict=True) if grad is not None]
    wanted = [x for x, need in zip(inputs, needed, strict=True) if need and x is not None]
    found = iter(
        torch.autograd.grad(
            [out for out, _ in pairs],
            wanted,
            [grad for _, grad in pairs],
            create_graph=True,
            allow_unused=True,
        )
    )
    return tuple(next(found) if need else None for need in needed)


class GatherMatmul(torch.autograd.Function):
    """`all_gather(x) @ w + bias` for each of several w."""

    @staticmethod
    def forward(
        ctx: Any, call: Call, num_weights: int, x: Tensor, *operands: Tensor | None
    ) -> tuple[Tensor, ...]:
        """Operands are the weights, then their biases or None."""
        ctx.set_materialize_grads(False)
        ctx.call, ctx.num_weights = call, num_weights
        ws, biases = operands[:num_weights], operands[num_weights:]
        steps = gather_forward(
            call.endpoint.transport,
            x,
            ws,  # type: ignore[arg-type]  # only biases may be None
            biases,
            call.collective.dim,
            call.choice,
        )
        outs, gathered = run(steps)
        kept = gathered if call.save_gathered else None
        ctx.save_for_backward(x, kept, *operands)
        return tuple(outs)

    @staticmethod
    def backward(ctx: Any, *dys: Tensor | None) -> tuple[Tensor | None, ...]:
        """Reduce-scatters dx under the weight gradients."""
        x, gathered, *operands = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        if all(dy is None for dy in dys):
            return (None,) * (2 + len(needed))
        if torch.is_grad_enabled():
            grads = _differentiable(_gather_composition(ctx), (x, *operands), needed, dys)
            return (None, None, *grads)
        return (None, None, *_gather_gradients(ctx, x, gathered, operands, needed, dys))


def _gather_composition(ctx: Any) -> Callable[..., tuple[Tensor, ...]]:
    call: Call = ctx.call
    count: int = ctx.num_weights

    def composition(x: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
        ws, biases = operands[:count], operands[count:]
        return gather_unfused(call.backend, call.collective, x, ws, biases)

    return composition


def _gather_gradients(
    ctx: Any,
    x: Tensor,
    gathered: Tensor | None,
    operands: Sequence[Tensor],
    needed: Sequence[bool],
    dys: Sequence[Tensor | None],
) -> tuple[Tensor | None, ...]:
    """(dx, *dws, *dbiases); an output without a cotangent takes no part."""
    count = ctx.num_weights
    active = [i for i, dy in enumerate(dys) if dy is not None]
    grads = [dy for dy in dys if dy is not None]
    ws, wanted = [operands[i] for i in active], [needed[1 + i] for i in active]
    dx, dws = _column_backward(ctx.call, x, gathered, ws, grads, needed[0], wanted)
    result: list[Tensor | None] = [None] * (1 + 2 * count)
    result[0] = dx
    for i, dw, dy in zip(active, dws, grads, strict=True):
        result[1 + i] = dw
        if needed[1 + count + i]:
            result[1 + count + i] = dy.reshape(-1, dy.shape[-1]).sum(0)
    return tuple(result)


def _column_backward(
    call: Call,
    x: Tensor,
    gathered: Tensor | None,
    ws: Sequence[Tensor],
    dys: Sequence[Tensor],
    needs_dx: bool,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Sequence[Tensor | None]]:
    dim, transport = call.collective.dim, call.endpoint.transport
    cut = Cut.of(dim, x.ndim)
    if not needs_dx:
        if gathered is None:
            gathered = cut.matrix(bind(call.backend, call.collective, x))
        left = cut.flip(gathered).t()
        pairs = zip(dys, wanted, strict=True)
        return None, [left @ cut.tokens(dy) if want else None for dy, want in pairs]
    flops = sum(2.0 * dy.numel() * w.shape[0] for dy, w in zip(dys, ws, strict=True))
    op = "all_gather_matmul backward"
    scatter = call.backward_choice(op, "scatter/direct", x, flops, flops * any(wanted))
    if gathered is not None or not any(wanted):
        return run(gather_backward(transport, gathered, ws, dys, wanted, dim, scatter))
    gather = Choice("gather/ring", scatter.num_parts)
    return run(gather_backward_again(transport, x, ws, dys, wanted, dim, scatter, gather))


class MatmulScatter(torch.autograd.Function):
    """`reduce_scatter(x @ w)`."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor) -> Tensor:
        """Saves both operands."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(x, w)
        transport, dim = call.endpoint.transport, call.collective.dim
        return run(scatter_forward(transport, x, w, dim, call.choice))

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        """One gather of dy feeds both gradients."""
        call: Call = ctx.call
        x, w = ctx.saved_tensors
        wanted = ctx.needs_input_grad[1:]
        if dy is None:
            return None, None, None
        if torch.is_grad_enabled():

            def composition(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
                return (reduce_unfused(call.backend, call.collective, x, w),)

            dx, dw = _differentiable(composition, (x, w), wanted, (dy,))
            return None, dx, dw
        dim = call.collective.dim
        flops = 2.0 * x.numel() * w.shape[1] * sum(wanted)
        op = "matmul_reduce_scatter backward"
        choice = call.backward_choice(op, "gather/ring", dy, flops)
        steps = scatter_backward(call.endpoint.transport, x, w, dy, wanted, dim, choice)
        return None, *run(steps)


class MatmulReduce(torch.autograd.Function):
    """`all_reduce(x @ w)`; its backward is the transposed collective and two plain matmuls."""

    @staticmethod
    def forward(ctx: Any, call: Call, x: Tensor, w: Tensor) -> Tensor:
        """Saves both operands."""
        ctx.set_materialize_grads(False)
        ctx.call = call
        ctx.save_for_backward(x, w)
        return run(reduce_forward(call.endpoint.transport, x, w, call.choice))

    @staticmethod
    def backward(ctx: Any, dy: Tensor | None) -> tuple[None, Tensor | None, Tensor | None]:
        """Differentiable itself: collectives and matmuls that autograd knows."""
        if dy is None:
            return None, None, None
        x, w = ctx.saved_tensors
        _, needs_dx, needs_dw = ctx.needs_input_grad
        dz = bind(ctx.call.backend, ctx.call.collective.transpose, dy)
        dx = dz @ w.t() if needs_dx else None
        dw = x.reshape(-1, x.shape[-1]).t() @ dz.reshape(-1, dz.shape[-1]) if needs_dw else None
        return None, dx, dw

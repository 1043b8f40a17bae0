"""Attention on simulated ranks in torch's kernel for CPUs, which keeps no scores in memory.

torch has no batching rule for the kernel, and no second derivative of it. So it gets the heads of
all ranks at once, as sequences of one batch, and a derivative that is differentiated again is that
of the scores in memory.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.collectives.autograd import TypedFunction, is_transformed
from shardmap_torch.collectives.scope import current_scope

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

_DTYPES: Final = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def fused(
    q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float, composed: Attend
) -> Tensor | None:
    """Attends: q [..., h, t, d], k [..., h, s, d], v [..., h, s, d] -> [..., h, t, d].

    `composed` does the same with the scores in memory. None where a transform of torch.func is
    active, code is compiled, or the kernel does not take the operands.
    """
    scope = current_scope()
    if scope is None or torch.compiler.is_compiling() or not _is_taken(q, k, v):
        return None
    attend = partial(_attend, causal, scale, composed)
    if isinstance(scope.backend, BatchedBackend):
        return scope.backend.on_stacks(attend, q, k, v)
    return None if is_transformed() else attend(q, k, v)


def _is_taken(q: Tensor, k: Tensor, v: Tensor) -> bool:
    return (
        {x.device.type for x in (q, k, v)} == {"cpu"}
        and q.dtype == k.dtype == v.dtype
        and q.dtype in _DTYPES
        and q.shape[-1] == v.shape[-1]
        and min(q.numel(), k.numel()) > 0
        and not torch.is_autocast_enabled("cpu")
    )


def _attend(
    causal: bool,
    scale: float,
    composed: Attend,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    ranks: Sequence[int] = (),
) -> Tensor:
    """Attends on stacks, with a leading dim for each level of `ranks`."""
    own = [x.expand(*ranks, *x.shape[len(ranks) :]) for x in (q, k, v)]
    flat = [x.reshape(-1, *x.shape[-3:]).contiguous() for x in own]
    y: Tensor = _Fused.apply(*flat, causal, scale, composed)
    return y.unflatten(0, own[0].shape[:-3]) if own[0].ndim > 3 else y.squeeze(0)


class _Fused(TypedFunction):
    """Autograd Function of the kernel on [b, h, t, d]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        causal: bool,
        scale: float,
        composed: Attend,
    ) -> Tensor:
        y, log_sum = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, causal, scale=scale
        )
        ctx.save_for_backward(q, k, v, y, log_sum)
        ctx.causal, ctx.scale, ctx.composed = causal, scale, composed
        result: Tensor = y
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, y, log_sum = ctx.saved_tensors
        rest = (None, None, None)
        if not torch.is_grad_enabled():
            grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, q, k, v, y, log_sum, 0.0, ctx.causal, scale=ctx.scale
            )
            return (*grads, *rest)
        needed = [
            x for x, is_needed in zip((q, k, v), ctx.needs_input_grad, strict=False) if is_needed
        ]
        found = iter(torch.autograd.grad(ctx.composed(q, k, v), needed, grad, create_graph=True))
        return (
            *[next(found) if is_needed else None for is_needed in ctx.needs_input_grad[:3]],
            *rest,
        )

"""Cross-entropy of a product with a sharded weight, a chunk of positions at a time."""

from typing import Any

import torch
from torch import Tensor

from shardmap_torch.function import Function
from shardmap_torch.nn.core.region import PerRank, per_rank
from shardmap_torch.nn.embedding import own_rows
from shardmap_torch.ops import all_reduce, axis_size, convert
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, R


def chunked_nats(axis: Axis, chunk_size: int, smoothing: float, z_loss: float) -> PerRank:
    """Makes the per-rank loss: x [..., d], weight [d, v/r], targets [...] -> nats [...]."""

    @per_rank("...d,dv,...->...", over={"v": axis})
    def nats_by_chunks(x: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
        nats, _ = _Nats.apply(
            x.flatten(0, -2), weight, targets.flatten(), axis, chunk_size, smoothing, z_loss
        )
        result: Tensor = nats.reshape(targets.shape)
        return result

    return nats_by_chunks


class _Nats(Function):
    """Autograd Function: x [n, d], weight [d, v/r], targets [n] -> nats [n], logsumexp [n]."""

    @staticmethod
    def forward(
        x: Tensor,
        weight: Tensor,
        targets: Tensor,
        axis: Axis,
        chunk_size: int,
        smoothing: float,
        z_loss: float,
    ) -> tuple[Tensor, Tensor]:
        num_classes = weight.shape[1] * axis_size(axis)
        chunks = []
        for rows, ids in zip(x.split(chunk_size), targets.split(chunk_size), strict=True):
            logits = _logits(rows, weight)
            largest = all_reduce(logits.amax(-1), axis, op="max", dst=R)
            logits = logits - largest.unsqueeze(-1)
            log_total = all_reduce(logits.exp().sum(-1), axis, dst=I).log()
            local, owned = own_rows(ids, weight.shape[1], axis, logits.dtype)
            score = logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * owned
            score = score * (1 - smoothing) + logits.sum(-1) * (smoothing / num_classes)
            nats = log_total - all_reduce(score, axis, dst=I)
            log_total = log_total + largest
            chunks.append((nats + z_loss * log_total.square(), log_total))
        if not chunks:
            return _logits(x, weight).sum(-1), _logits(x, weight).sum(-1)
        by_chunk = list(zip(*chunks, strict=True))
        return torch.cat(by_chunk[0]), torch.cat(by_chunk[1])

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        x, weight, targets, ctx.axis, ctx.chunk_size, ctx.smoothing, ctx.z_loss = inputs
        ctx.save_for_backward(x, weight, targets, output[1])

    @staticmethod
    def backward(ctx: Any, grad: Tensor, grad_log_total: Tensor) -> tuple[Tensor | None, ...]:
        """Computes the gradients from this rank's columns of the logits', softmax - targets.

        A second derivative flows through the saved logsumexp, which therefore has a gradient.
        """
        x, weight, targets, log_totals = ctx.saved_tensors
        # Each rank uses the cotangents for its own columns.
        grad, grad_log_total = convert((grad, grad_log_total), ctx.axis, src=I, dst=R)
        num_classes = weight.shape[1] * axis_size(ctx.axis)
        d_rows, d_weight = [], torch.zeros_like(weight)
        parts = x, targets, log_totals, grad, grad_log_total
        chunks = zip(*(part.split(ctx.chunk_size) for part in parts), strict=True)
        for rows, ids, log_total, g, g_log_total in chunks:
            probabilities = (_logits(rows, weight) - log_total.unsqueeze(-1)).exp()
            scale = g * (1 + 2 * ctx.z_loss * log_total) + g_log_total
            local, owned = own_rows(ids, weight.shape[1], ctx.axis, probabilities.dtype)
            d_logits = probabilities * scale.unsqueeze(-1) - (
                g * (ctx.smoothing / num_classes)
            ).unsqueeze(-1)
            d_target = (g * owned * (1 - ctx.smoothing)).unsqueeze(-1)
            d_logits = d_logits.scatter_add(-1, local.unsqueeze(-1), -d_target).to(x.dtype)
            d_rows.append(d_logits @ weight.mT)
            d_weight = d_weight + rows.mT @ d_logits
        d_x = torch.cat(d_rows) if d_rows else torch.zeros_like(x)
        return d_x, d_weight, None, None, None, None, None


def _logits(rows: Tensor, weight: Tensor) -> Tensor:
    logits = rows @ weight
    return logits.to(torch.promote_types(logits.dtype, torch.float32))

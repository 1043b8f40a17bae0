"""The parallel layers of a transformer: what one rank of axis "tp" computes.

Between layers the sequence is cut over the ranks (sequence parallelism), within them the heads,
the feed-forward width or the vocabulary (tensor parallelism). Shapes are named:

    b sequences   t positions   d model width   h heads   k head width   v vocabulary   n any width

and `t/tp` is this rank's part of t. Every matmul that communicates goes through `column` or `row`,
whose `overlap` says whether its communication hides behind it: "off" is `all_gather`, then the
matmul; the matmul, then `reduce_scatter`.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_reduce,
    axis_index,
    convert,
    local_region,
    reduce_scatter,
)
from shardmap_torch.kernels import Overlap, all_gather_matmul, matmul_reduce_scatter


def column(x: Tensor, weight: Tensor, overlap: Overlap) -> Tensor:
    """x [b, t/tp, d], weight [d, n/tp, ...] -> [b, t, n/tp, ...]."""
    flat = all_gather_matmul(x, weight.flatten(1), "tp", gather_dim=1, overlap=overlap)
    y: Tensor = flat.unflatten(-1, weight.shape[1:])
    return y


def row(x: Tensor, weight: Tensor, overlap: Overlap) -> Tensor:
    """x [b, t, n/tp, ...], weight [n/tp, ..., d] -> [b, t/tp, d]."""
    x, weight = x.flatten(2), weight.flatten(0, -2)
    return matmul_reduce_scatter(x, weight, "tp", scatter_dim=1, overlap=overlap)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x [b, t/tp, d], scale [d] -> [b, t/tp, d].

    Each rank scales other positions, so the gradient of `scale` is summed over the ranks: R, not I.
    """
    scale = convert(scale, "tp", src=I, dst=R)
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * scale


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens [b, t], table [v/tp, d] -> [b, t/tp, d]."""
    return reduce_scatter(_own_embeddings(tokens, table), "tp", dim=1)


# What a rank does alone, so that check="global" may take the rest for a one-device program.
@local_region(in_types=(P("dp"), P("tp")), out_types=P("dp", partial={"tp"}))
def _own_embeddings(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens [b, t], table [v/tp, d] -> [b, t, d], zero where another rank has the row."""
    ids, owned = _own_rows(tokens, table.shape[0])
    return functional.embedding(ids, table) * owned.unsqueeze(-1)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [b, t, v/tp], targets [b, t] -> nats [b, t], never gathering the vocabulary."""
    largest = all_reduce(logits.detach().amax(-1, keepdim=True), "tp", op="max", dst=R)
    logits = logits - largest
    total = all_reduce(logits.exp().sum(-1), "tp", dst=I)
    return total.log() - all_reduce(_own_logits(logits, targets), "tp", dst=I)


@local_region(in_types=(P("dp", None, "tp"), P("dp")), out_types=P("dp", partial={"tp"}))
def _own_logits(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [b, t, v/tp], targets [b, t] -> [b, t], zero where another rank has the target."""
    ids, owned = _own_rows(targets, logits.shape[-1])
    return logits.gather(-1, ids.unsqueeze(-1)).squeeze(-1) * owned


def _own_rows(ids: Tensor, num_rows: int) -> tuple[Tensor, Tensor]:
    """Where each id stands among this rank's rows, and whether it does; 0 where not."""
    local = ids - axis_index("tp") * num_rows
    owned = (local >= 0) & (local < num_rows)
    return local * owned, owned


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b, t, h/tp, k] -> [b, t, h/tp, k]; each rank attends with its own heads."""
    length, width = q.shape[1], q.shape[-1]
    q, k, v = (x.transpose(1, 2) for x in (rotate(q), rotate(k), v))
    scores: Tensor = q @ k.mT / math.sqrt(width)
    future = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2)


def rotate(x: Tensor) -> Tensor:
    """Rotary positions: x [b, t, h, k] turns, pair by pair, by its position times a frequency."""
    length, half = x.shape[1], x.shape[-1] // 2
    steps = torch.arange(half, dtype=x.dtype, device=x.device) / half
    positions = torch.arange(length, dtype=x.dtype, device=x.device)
    angles = torch.outer(positions, torch.pow(10_000.0, -steps)).unsqueeze(1)
    cos, sin = angles.cos(), angles.sin()
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, first * sin + second * cos], -1)

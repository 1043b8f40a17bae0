"""The layers of the GPT: those of `shardmap_torch.nn`, as its `Parallel` has chosen them.

Within the layers the heads, the feed-forward width or the vocabulary are sharded over "tp", and
with context parallelism the positions over "cp". Between them activations are equal on the ranks of
"tp", or sharded along the positions (sequence parallelism). Shapes are named:

    b sequences   t positions   d model width   h heads   k head width   v vocabulary   n any width

b and t are this rank's over "dp" and "cp"; `t/tp` is t, or with sequence parallelism a part of it.
"""

from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from examples.gpt.parallel import Parallel
from shardmap_torch import Partial, R, axis_size, nn, redistribute
from shardmap_torch.kernels import Overlap

Tables: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines of the angles by which the features of queries and keys turn."""


def column(x: Tensor, weight: Tensor, parallel: Parallel, overlap: Overlap) -> Tensor:
    """x [b, t/tp, d], weight [d, n/tp, ...] -> [b, t, n/tp, ...]."""
    return nn.column_linear(x, weight, "tp", src=parallel.between_layers(), overlap=overlap)


def row(x: Tensor, weight: Tensor, parallel: Parallel, overlap: Overlap) -> Tensor:
    """x [b, t, n/tp, ...], weight [n/tp, ..., d] -> [b, t/tp, d]."""
    return nn.row_linear(x, weight, "tp", dst=parallel.between_layers(), overlap=overlap)


def experts(x: Tensor, layer: Any, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """x [b, t/tp, d] -> the same, and how uneven the loads of the experts are."""
    names = ("gate_up", "down")  # [e/ep, d, 2, f/tp], [e/ep, f/tp, d]
    made, balance = nn.moe(
        x.flatten(0, 1).unsqueeze(1),  # no position waits for another: there is room for all
        layer["router"],
        {name: layer[name] for name in names},
        "ep",
        expert=partial(_feed_forward, length=x.shape[1], parallel=parallel),
        capacity_factor=None,
        batch_axis=("edp", *parallel.positions),
        router_type=R,
    )
    return made.reshape(x.shape), balance


def _feed_forward(weights: Any, x: Tensor, length: int, parallel: Parallel) -> Tensor:
    """x [e/ep, n * t/tp, d] -> the same; `length` is t/tp."""
    layout = parallel.between_layers(dim=2)
    x = redistribute(x.unflatten(1, (-1, length)), "tp", src=layout, dst=R)
    n, t = x.shape[1:3]
    gate, up = (x.flatten(1, 2) @ w for w in weights["gate_up"].unbind(2))
    made = (functional.silu(gate) * up) @ weights["down"]
    result: Tensor = redistribute(made.unflatten(1, (n, t)), "tp", src=Partial, dst=layout)
    return result.flatten(1, 2)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x [b, t/tp, d], scale [d] -> [b, t/tp, d]; each rank's gradient of `scale` is an addend."""
    return nn.rms_norm(x, scale)


def embed(tokens: Tensor, table: Tensor, parallel: Parallel) -> Tensor:
    """tokens [b, t], table [v/tp, d] -> [b, t/tp, d]."""
    return nn.vocab_parallel_embedding(tokens, table, "tp", dst=parallel.between_layers())


def cross_entropy(logits: Tensor, targets: Tensor, parallel: Parallel) -> Tensor:
    """logits [b, t, v/tp], targets [b, t] -> mean nats a token over the batch of all ranks."""
    return nn.vocab_parallel_cross_entropy(
        logits, targets, "tp", batch_axis=parallel.data, ignore_index=None
    )


def rotary_tables(tokens: Tensor, width: int, dtype: torch.dtype, parallel: Parallel) -> Tables:
    """Tokens [b, t], the head width k -> twice [t, 1, k/2]; all layers turn by the same angles."""
    axis = parallel.context
    length = tokens.shape[1] * (axis_size(axis) if axis else 1)
    at = nn.positions(length, axis, device=tokens.device)
    return nn.rotary_tables(at, width, dtype=torch.promote_types(dtype, torch.float32))


def causal_attention(q: Tensor, k: Tensor, v: Tensor, tables: Tables, parallel: Parallel) -> Tensor:
    """q, k, v [b, t, h/tp, k] -> [b, t, h/tp, k]; each rank attends with its own heads."""
    axis = parallel.context
    q, k = nn.rotary(q, tables), nn.rotary(k, tables)
    if axis is None:
        return nn.attention(q, k, v, causal=True)
    return nn.ring_attention(q, k, v, axis)

"""Bodies that local strictness accepts, as JAX does, and that are other programs on one device."""

from collections.abc import Callable
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import (
    I,
    P,
    R,
    all_gather,
    all_reduce,
    axis_index,
    axis_size,
    convert,
    make_mesh,
    ppermute,
    random,
    shard_map,
)

MESH: Final = make_mesh((2, 4), ("dp", "tp"), kind="abstract")
X, W, B = torch.randn(8, 16), torch.randn(16, 32), torch.randn(32)
W2, B2 = torch.randn(32, 16), torch.randn(16)
ARGS: Final = tuple(value.double().requires_grad_() for value in (X, W, B, W2, B2))
SPECS: Final = (P("dp"), P(None, "tp"), P("tp"), P("tp"), P())
Body = Callable[..., Tensor]


def mapped(body: Body, out: P, check: Any = "global", mesh: Any = MESH) -> Body:
    """A body of an input, two layers' weights and their biases."""
    return shard_map(body, mesh=mesh, in_specs=SPECS, out_specs=out, check=check)


def bias_before_reduction(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce((x @ w + b) @ w2 + b2, "tp", dst=I)


def fused_bias_before_reduction(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce(functional.linear(x @ w + b, w2.T, b2), "tp", dst=I)


def residual_before_reduction(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce((x @ w + b) @ w2 + x, "tp", dst=I)


def softmax_over_cut(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce((x @ w).softmax(-1) @ w2, "tp", dst=I)


def mean_over_cut(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    return all_reduce((h - h.mean(-1, keepdim=True)) @ w2, "tp", dst=I)


def mean_by_local_size(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    mean = all_reduce(h.sum(-1, keepdim=True), "tp", dst=R) / h.shape[-1]
    return all_reduce((h - mean) @ w2, "tp", dst=I)


def norm_over_cut(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce(functional.layer_norm(x @ w, (8,)) @ w2, "tp", dst=I)


def norm_of_own_width(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    return all_reduce(functional.layer_norm(h, h.shape[-1:]) @ w2, "tp", dst=I)


def heads_of_local_number(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = (x @ w).view(x.shape[0], 4, -1)  # 4 heads on each rank, and 4 on one device
    return all_reduce(h.softmax(-1).flatten(1) @ w2, "tp", dst=I)


def heads_of_local_size(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = (x @ w).view(4, 2, 4)  # fails on one device
    return all_reduce(h.softmax(-1).flatten(1) @ w2, "tp", dst=I)


def features_before_heads(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = (x @ w).unflatten(-1, (4, -1))  # another split: what is sharded is not the leading part
    y: Tensor = all_reduce(h.softmax(-1).flatten(1) @ w2, "tp", dst=I)
    return y


def positions_not_offset(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    positions = torch.arange(x.shape[0], dtype=x.dtype)
    return all_reduce((x + positions[:, None]) @ w @ w2, "tp", dst=I)


def sum_of_shards(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = all_reduce(x @ w, "tp", dst=R)  # adds up other features
    return all_reduce(h @ w2, "tp", dst=I)


def gathered_along_another_dim(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = all_gather(x @ w, "tp", dim=0, dst=R)
    return all_reduce(h[: x.shape[0]] @ w2, "tp", dst=I)


def wrong_features_paired(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    ring = [(rank, (rank + 1) % axis_size("tp")) for rank in range(axis_size("tp"))]
    return all_reduce(ppermute(x @ w, "tp", ring) @ w2, "tp", dst=I)


def rank_used(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce((x @ w) * axis_index("tp") @ w2, "tp", dst=I)


def maximum_over_cut(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    return all_reduce((h - h.amax(-1, keepdim=True)) @ w2, "tp", dst=I)


def mask_from_nothing(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    mask = torch.rand(x.shape[1], dtype=x.dtype) < 0.5  # another mask on each rank
    x = convert(x, "tp", src=I, dst=R) * mask
    return all_reduce(x @ w @ w2, "tp", dst=I)


def drawn_into_a_part(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    scale = torch.zeros(2, dtype=x.dtype)
    scale[:1].uniform_()  # another number on each rank
    return all_reduce((x @ w * scale[:1]) @ w2, "tp", dst=I)


def filled_with_local_size(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    return all_reduce((h / torch.full((1,), h.shape[1], dtype=x.dtype)) @ w2, "tp", dst=I)


def norms_of_pieces(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    return all_reduce((h / torch._foreach_norm([torch.ones_like(h)])[0]) @ w2, "tp", dst=I)


def steps_of_ranks(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    for _ in range(axis_size("tp")):
        w = w * 2
    return all_reduce(x @ w @ w2, "tp", dst=I)


def smoothing_over_vocabulary(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    logits = x @ w
    nats = all_reduce(logits.exp().sum(-1), "tp", dst=I).log()
    return nats - all_reduce(logits.mean(-1), "tp", dst=I)


def dropped_as_a_whole(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return random.dropout(random.key(0), x, 0.5)  # without spec=, of the part as of all


def dropped_over_fewer_axes(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = random.dropout(random.key(0), x @ w, 0.5, spec=P("dp"))  # features are sharded too
    return all_reduce(h @ w2, "tp", dst=I)


def mean_all_reduce(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    return all_reduce(x @ w @ w2, "tp", op="mean", dst=I)


def write_of_another_cut(x: Tensor, w: Tensor, b: Tensor, w2: Tensor, b2: Tensor) -> Tensor:
    h = x @ w
    buffer = torch.zeros(x.shape[0], h.shape[1], dtype=x.dtype)
    buffer = buffer + 0 * h
    buffer.copy_(all_gather(h, "tp", dim=1, dst=R)[:, : h.shape[1]])
    return all_reduce(buffer @ w2, "tp", dst=I)


WRONG: Final = (
    bias_before_reduction,
    fused_bias_before_reduction,
    residual_before_reduction,
    softmax_over_cut,
    mean_over_cut,
    mean_by_local_size,
    norm_over_cut,
    norm_of_own_width,
    heads_of_local_number,
    heads_of_local_size,
    features_before_heads,
    positions_not_offset,
    sum_of_shards,
    gathered_along_another_dim,
    wrong_features_paired,
    rank_used,
    maximum_over_cut,
    mask_from_nothing,
    drawn_into_a_part,
    filled_with_local_size,
    norms_of_pieces,
    steps_of_ranks,
    smoothing_over_vocabulary,
    dropped_as_a_whole,
    dropped_over_fewer_axes,
    mean_all_reduce,
    write_of_another_cut,
)
"""Each with a result that is sharded over dp."""

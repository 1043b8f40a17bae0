"""The layers of the GPT: those of `shardmap_torch.nn` over axis "tp", the sequence sharded between.

Between layers the sequence is sharded over the ranks (sequence parallelism), within them the heads,
the feed-forward width or the vocabulary (tensor parallelism). Shapes are named:

    b sequences   t positions   d model width   h heads   k head width   v vocabulary   n any width

and `t/tp` is this rank's part of t.
"""

from torch import Tensor

from shardmap_torch import S, nn
from shardmap_torch.kernels import Overlap

SEQUENCE = S(1)


def column(x: Tensor, weight: Tensor, overlap: Overlap) -> Tensor:
    """x [b, t/tp, d], weight [d, n/tp, ...] -> [b, t, n/tp, ...]."""
    return nn.column_linear(x, weight, "tp", src=SEQUENCE, overlap=overlap)


def row(x: Tensor, weight: Tensor, overlap: Overlap) -> Tensor:
    """x [b, t, n/tp, ...], weight [n/tp, ..., d] -> [b, t/tp, d]."""
    return nn.row_linear(x, weight, "tp", dst=SEQUENCE, overlap=overlap)


def rms_norm(x: Tensor, scale: Tensor) -> Tensor:
    """x [b, t/tp, d], scale [d] -> [b, t/tp, d]."""
    return nn.rms_norm(x, scale, "tp")


def embed(tokens: Tensor, table: Tensor) -> Tensor:
    """tokens [b, t], table [v/tp, d] -> [b, t/tp, d]."""
    return nn.vocab_parallel_embedding(tokens, table, "tp", dst=SEQUENCE)


def cross_entropy(logits: Tensor, targets: Tensor) -> Tensor:
    """logits [b, t, v/tp], targets [b, t] -> mean nats a token over the batch of all ranks."""
    return nn.vocab_parallel_cross_entropy(
        logits, targets, "tp", batch_axis="dp", ignore_index=None
    )


def causal_attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """q, k, v [b, t, h/tp, k] -> [b, t, h/tp, k]; each rank attends with its own heads."""
    at = nn.positions(q.shape[1], device=q.device)
    return nn.attention(nn.rotary(q, at), nn.rotary(k, at), v, causal=True)

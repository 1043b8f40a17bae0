"""Layers as pure functions on local tensors, with typed collectives inside.

Each layer takes the mesh axis that it communicates over, and works on whatever shards the other
axes make of its batch. Use them in the body of a `shard_map`.
"""

from shardmap_torch.nn.attention import attention, own_kv_heads
from shardmap_torch.nn.embedding import vocab_parallel_embedding
from shardmap_torch.nn.linear import column_linear, row_linear
from shardmap_torch.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from shardmap_torch.nn.norm import layer_norm, rms_norm
from shardmap_torch.nn.rotary import positions, rotary

__all__ = [
    "attention",
    "column_linear",
    "layer_norm",
    "own_kv_heads",
    "positions",
    "rms_norm",
    "rotary",
    "row_linear",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]

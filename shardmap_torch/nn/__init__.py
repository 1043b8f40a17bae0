"""Layers as pure functions on local tensors, with typed collectives inside.

Each layer takes the mesh axis that it communicates over, and works on whatever shards the other
axes make of its batch. Use them in the body of a `shard_map`; a checked one raises `ShardTypeError`
for arguments of other types than a layer says.
"""

from shardmap_torch.contracts import export
from shardmap_torch.errors import LayerError
from shardmap_torch.nn.attention import attention, kv_update, own_kv_heads
from shardmap_torch.nn.context import head_tail_order, ring_attention, ulysses_attention
from shardmap_torch.nn.embedding import vocab_parallel_embedding
from shardmap_torch.nn.fsdp import fsdp_gather, fsdp_layer, fsdp_layers
from shardmap_torch.nn.linear import column_linear, row_linear
from shardmap_torch.nn.loss import vocab_parallel_cross_entropy, vocab_parallel_linear_cross_entropy
from shardmap_torch.nn.moe import dropless_moe, grouped_linear, moe
from shardmap_torch.nn.norm import batch_norm, layer_norm, rms_norm
from shardmap_torch.nn.pipeline import (
    gpipe_schedule,
    one_forward_one_backward_schedule,
    pipeline_value_and_grad,
)
from shardmap_torch.nn.rotary import positions, rotary, rotary_tables
from shardmap_torch.random import dropout

__all__ = [
    "attention",
    "batch_norm",
    "column_linear",
    "dropless_moe",
    "dropout",
    "fsdp_gather",
    "fsdp_layer",
    "fsdp_layers",
    "gpipe_schedule",
    "grouped_linear",
    "head_tail_order",
    "kv_update",
    "layer_norm",
    "moe",
    "one_forward_one_backward_schedule",
    "own_kv_heads",
    "pipeline_value_and_grad",
    "positions",
    "ring_attention",
    "rms_norm",
    "rotary",
    "rotary_tables",
    "row_linear",
    "ulysses_attention",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "vocab_parallel_linear_cross_entropy",
]

export(globals(), __all__, LayerError)

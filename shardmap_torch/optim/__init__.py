"""Optimizers on pytrees of local tensors, gradient sums, clipping, and ZeRO.

All functions are pure and run in the body of a shard_mapped function, where values are plain local
tensors; `adamw`, `sgd`, `global_norm` and `clip_by_global_norm` take trees of DTensors and plain
tensors outside as well.
"""

from shardmap_torch.contracts import export
from shardmap_torch.errors import OptimizerError
from shardmap_torch.optim.adamw import adamw
from shardmap_torch.optim.norm import clip_by_global_norm, clip_grad_norm_, global_norm
from shardmap_torch.optim.optimizer import Optimizer, warmup_cosine
from shardmap_torch.optim.sgd import sgd
from shardmap_torch.optim.sync import sync_gradients
from shardmap_torch.optim.zero import shard_over, zero

__all__ = [
    "Optimizer",
    "adamw",
    "clip_by_global_norm",
    "clip_grad_norm_",
    "global_norm",
    "sgd",
    "shard_over",
    "sync_gradients",
    "warmup_cosine",
    "zero",
]

export(globals(), __all__, OptimizerError)

"""Support for torch.nn.Module: pure functions of modules, and parallel plans in torch's words."""

from shardmap_torch.parallel.loss import loss_parallel
from shardmap_torch.parallel.module import parallelize
from shardmap_torch.parallel.pure import functional
from shardmap_torch.parallel.styles import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

__all__ = [
    "ColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "RowwiseParallel",
    "SequenceParallel",
    "functional",
    "loss_parallel",
    "parallelize",
]

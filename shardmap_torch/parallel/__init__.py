"""Support for torch.nn.Module: pure functions of modules, and plans of the styles of torch."""

from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardmap_torch.contracts import export
from shardmap_torch.errors import SpecError
from shardmap_torch.parallel.loss import loss_parallel
from shardmap_torch.parallel.module import parallelize
from shardmap_torch.parallel.pure import functional
from shardmap_torch.parallel.styles import (
    ExpertsDispatch,
    ExpertsParallel,
    LocalAttributes,
    PackedColwiseParallel,
    ReplicatedParallel,
)
from shardmap_torch.parallel.summary import parallel_summary
from shardmap_torch.parallel.weights import load_safetensors, save_pretrained

__all__ = [
    "ColwiseParallel",
    "ExpertsDispatch",
    "ExpertsParallel",
    "LocalAttributes",
    "PackedColwiseParallel",
    "ParallelStyle",
    "PrepareModuleInput",
    "PrepareModuleInputOutput",
    "PrepareModuleOutput",
    "ReplicatedParallel",
    "RowwiseParallel",
    "SequenceParallel",
    "functional",
    "load_safetensors",
    "loss_parallel",
    "parallel_summary",
    "parallelize",
    "save_pretrained",
]

export(globals(), __all__, SpecError)

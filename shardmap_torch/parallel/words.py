"""The words of transformers for styles, in one table."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch.distributed.tensor import Partial, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardmap_torch.parallel.styles import (
    ExpertsDispatch,
    ExpertsParallel,
    PackedColwiseParallel,
    ReplicatedParallel,
)
from shardmap_torch.spec import P


@dataclass(frozen=True)
class Split:
    """The sharding of a parameter: along a dim, each of its equal parts by itself.

    Attributes:
        dim: the dim, counted from the front or the end.
        parts: how many equal parts the dim has, each of which is sharded.
    """

    dim: int
    parts: int = 1


def spec_of_split(split: Split | None, axis: str) -> P:
    """Returns the spec of a parameter; its parts are a dim of their own, before the sharded one."""
    if split is None:
        return P()
    return P(*[None] * (split.dim + (split.parts > 1)), axis)


@dataclass(frozen=True)
class Word:
    """The meaning of a style string.

    Attributes:
        style: the style of a module of this name.
        matrix: how a parameter of this name is sharded that is no vector; None if not at all.
        vector: the same for a vector.
    """

    style: ParallelStyle
    matrix: Split | None = None
    vector: Split | None = None

    def split(self, ndim: int) -> Split | None:
        """Returns how a parameter of so many dims is sharded, its dim counted from the front."""
        split = self.vector if ndim == 1 else self.matrix
        return None if split is None else Split(split.dim % ndim, split.parts)


_REPLICATED: Final = Word(ReplicatedParallel())
_COLUMNS: Final = (Split(-2), Split(-1))

WORDS: Final[Mapping[str, Word]] = MappingProxyType(
    {
        "colwise": Word(ColwiseParallel(), *_COLUMNS),
        "colwise_gather_output": Word(ColwiseParallel(output_layouts=Replicate()), *_COLUMNS),
        "colwise_rep": Word(ColwiseParallel(output_layouts=Replicate()), *_COLUMNS),
        "rowwise": Word(RowwiseParallel(), Split(-1)),
        "rowwise_split_input": Word(RowwiseParallel(input_layouts=Replicate()), Split(-1)),
        "rowwise_rep": Word(RowwiseParallel(input_layouts=Replicate()), Split(-1)),
        "embedding_rowwise": Word(RowwiseParallel(input_layouts=Replicate()), Split(0)),
        "embedding_colwise": Word(ColwiseParallel(output_layouts=Replicate()), Split(1)),
        "packed_colwise": Word(PackedColwiseParallel(parts=2), Split(-2, 2), Split(-1, 2)),
        "packed_rowwise": Word(ReplicatedParallel(), Split(-1, 2)),
        "moe_tp_experts": Word(ExpertsParallel()),
        "ep_dispatch_experts": Word(ExpertsDispatch()),
        "grouped_gemm": Word(ReplicatedParallel(), Split(0), Split(0)),
        # Ranks add up what experts return, so one of them returns its input.
        "moe_identity_expert": Word(
            PrepareModuleOutput(output_layouts=Replicate(), desired_output_layouts=Partial())
        ),
        "all_reduce": Word(
            PrepareModuleOutput(output_layouts=Partial(), desired_output_layouts=Replicate())
        ),
        "sequence_parallel": Word(SequenceParallel()),
        # The gradients of these are summed where their types say so, without a word.
        "replicated_with_grad_allreduce": _REPLICATED,
        "mla_kv_a_proj": _REPLICATED,
        "local_params": _REPLICATED,
        "replicate": _REPLICATED,
    }
)
"""The style strings of transformers 5."""

"""The words of transformers for styles, in one table, and the parameters that they shard."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleOutput,
    RowwiseParallel,
    SequenceParallel,
)

from shardmap_torch.boundary.placements import placements_of
from shardmap_torch.core.torch_private.dtensor import StridedShard
from shardmap_torch.mesh import Mesh
from shardmap_torch.parallel.styles import (
    ExpertsDispatch,
    ExpertsParallel,
    PackedColwiseParallel,
    ReplicatedParallel,
    SharedResult,
)
from shardmap_torch.saving.pieces import checkpoint_pieces
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
        "mla_kv_a_proj": Word(SharedResult()),  # heads have one key for positions
        "local_params": _REPLICATED,
        "replicate": _REPLICATED,
    }
)
"""The style strings of transformers 5."""


def pack(value: Tensor, split: Split | None, mesh: Mesh, spec: P) -> Tensor:
    """Returns a parameter with a dim for its parts, by whose next one it is sharded."""
    if split is None or split.parts == 1:
        return value
    whole = value.to_local() if isinstance(value, DTensor) else value
    parts: Tensor = whole.unflatten(split.dim, (split.parts, -1))
    if not isinstance(value, DTensor):
        return parts
    placements = placements_of(mesh, spec)
    return DTensor.from_local(parts, value.device_mesh, placements, run_check=False)


def unpack(value: Tensor, split: Split | None) -> Tensor:
    """Undoes `pack` on one rank."""
    return value if split is None else value.flatten(split.dim, split.dim + 1)


def placements_of_split(mesh: Mesh, split: Split | None, spec: P) -> Sequence[Placement]:
    """Returns the placements of a parameter on the mesh."""
    if split is None or split.parts == 1:
        return placements_of(mesh, spec)
    checkpoint_pieces()
    return [_without_parts(each, split) for each in placements_of(mesh, spec)]


def _without_parts(placement: Placement, split: Split) -> Placement:
    """Returns a placement of a packed parameter as one of the parameter itself."""
    if not isinstance(placement, Shard) or placement.dim < split.dim:
        return placement
    if placement.dim > split.dim + 1:
        return Shard(placement.dim - 1)
    return StridedShard(split.dim, split_factor=split.parts)

"""Checkpoints of DTensors of which a rank has several pieces of a dim, as of a packed matrix.

torch.distributed.checkpoint asks a DTensor for its chunks, and the DTensor of torch 2.13 says that
it has one, which begins at its first entry: a save is refused, for chunks that overlap, and
`set_model_state_dict(broadcast_from_rank0=True)` copies other rows (`findings/`).
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise, product
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate, distribute_tensor

from shardmap_torch.core.torch_private.dtensor import state_dict_utils

Ranges: TypeAlias = Sequence[range]
"""The positions of a dim that a rank has, in order."""

Pieces: TypeAlias = dict[tuple[int, ...], tuple[slice, ...]]
"""The parts of a local tensor, by their offsets in the global one."""


def own_ranges(value: DTensor) -> list[Ranges]:
    """Returns the positions that this rank has of each dim.

    Uneven shards are those of `torch.chunk`.
    """
    dims: list[Ranges] = [[range(size)] for size in value.shape]
    coordinate = value.device_mesh.get_coordinate()
    assert coordinate is not None  # who has a shard is in the mesh
    for at, placement in enumerate(value.placements):
        if not isinstance(placement, Replicate):
            dim: int = placement.dim  # type: ignore[attr-defined]  # a sharded placement
            count = value.device_mesh.size(at)
            dims[dim] = _shard(dims[dim], placement, count, coordinate[at])
    return dims


def _shard(ranges: Ranges, placement: Placement, count: int, index: int) -> Ranges:
    """Returns what one of the shards of a dim has of these positions."""
    found: list[range] = []
    blocks: int = getattr(placement, "split_factor", 1)
    for block in _chunks(ranges, blocks):
        found += _chunks(block, count)[index]
    joined: list[range] = []
    for each in found:
        if joined and joined[-1].stop == each.start:
            each = range(joined.pop().start, each.stop)
        joined.append(each)
    return joined


def _chunks(ranges: Ranges, count: int) -> list[Ranges]:
    """Splits positions as `torch.chunk` does; those that are left over are empty."""
    size = -(-sum(map(len, ranges)) // count)
    starts = [0, *accumulate(map(len, ranges))]

    def part(first: int) -> Ranges:
        parts = (
            each[max(first - start, 0) : max(first + size - start, 0)]
            for each, start in zip(ranges, starts, strict=False)
        )
        return [each for each in parts if each]

    return [part(size * index) for index in range(count)]


def _pieces(value: DTensor) -> Pieces:
    """Returns the pieces that this rank has, if a dim has several; else none."""
    if all(getattr(placement, "split_factor", 1) == 1 for placement in value.placements):
        return {}
    dims = own_ranges(value)
    if all(len(ranges) < 2 for ranges in dims):
        return {}
    local = [
        [slice(*ends) for ends in pairwise([0, *accumulate(map(len, ranges))])] for ranges in dims
    ]
    offsets = product(*([each.start for each in ranges] for ranges in dims))
    return dict(zip(offsets, product(*local), strict=True))


@cache
def checkpoint_pieces() -> None:
    """Has torch's checkpoints, ours among them, take a DTensor's pieces one by one.

    Called where the first packed parameter is placed. All other DTensors are saved as before.
    """
    for name, method in _METHODS.items():
        setattr(DTensor, name, method)
    utils: Any = state_dict_utils
    utils._distribute_tensors = _distributing(utils._distribute_tensors)


_NAMES: Final = ("__create_write_items__", "__create_chunk_list__", "__get_tensor_shard__")
_TORCH: Final[dict[str, Any]] = {name: vars(DTensor)[name] for name in _NAMES}


def _write_items(self: DTensor, fqn: str, value: Any) -> list[Any]:
    from torch.distributed.checkpoint.metadata import MetadataIndex

    items: list[Any] = _TORCH["__create_write_items__"](self, fqn, value)
    return [
        replace(
            items[0],
            index=MetadataIndex(fqn, chunk.offsets),
            tensor_data=replace(items[0].tensor_data, chunk=chunk),
        )
        for chunk in _chunks_of(self)
    ] or items


def _chunk_list(self: DTensor) -> list[Any]:
    return _chunks_of(self) or _TORCH["__create_chunk_list__"](self)


def _chunks_of(value: DTensor) -> list[Any]:
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    return [
        ChunkStorageMetadata(
            torch.Size(offsets), torch.Size(each.stop - each.start for each in local)
        )
        for offsets, local in _pieces(value).items()
    ]


def _tensor_shard(self: DTensor, index: Any) -> Tensor:
    local: Tensor = _TORCH["__get_tensor_shard__"](self, index)
    pieces = _pieces(self)
    return local[pieces[tuple(index.offset)]] if pieces else local


_METHODS: Final = dict(zip(_NAMES, (_write_items, _chunk_list, _tensor_shard), strict=True))


def _distributing(by_torch: Callable[..., None]) -> Callable[..., None]:
    def distribute(states: dict[str, Any], keys: Any, *others: Any, **options: Any) -> None:
        """Places the full tensor of each state as its DTensor is, as torch does with one piece."""
        for key in keys:
            state = states.get(key)
            if isinstance(state, tuple) and _pieces(state[0]):
                like, full = state
                mesh, placements = like.device_mesh, like.placements
                new = distribute_tensor(full, mesh, placements, src_data_rank=None)
                if not like.is_meta:
                    like.to_local().copy_(new.to_local())
                states[key] = new if like.is_meta else like
        by_torch(states, keys, *others, **options)

    return distribute

"""Embedding whose table is sharded by rows over an axis (vocabulary parallelism)."""

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.errors import LayerError
from shardmap_torch.nn.arguments import read_layout
from shardmap_torch.nn.region import PerRank, per_rank
from shardmap_torch.ops import axis_index, axis_size, redistribute
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, Partial, TypeLike


def vocab_parallel_embedding(
    ids: Tensor, table: Tensor, axis: Axis, *, dst: TypeLike = I
) -> Tensor:
    """Looks up rows of a table whose rows (the vocabulary) are sharded over `axis`.

    Each rank looks up the ids whose rows it has, and the ranks' results are summed. The gradient
    of the table stays sharded and is not communicated.

    Shape: ids [...], table [v/r, d] gives [..., d] on each of r ranks; for `dst=S(i)` dimension i
    is divided by r. Types: ids are equal on the ranks of `axis`, the table is sharded (S(0)), the
    result is `dst`. Backward: for `dst=I` nothing is sent, for `dst=R` the cotangent is
    all-reduced, for `dst=S(i)` gathered. Sends 2(r-1)/r * y.nbytes for I and R, (r-1)/r * y.nbytes
    for S(i), y being all of the result; nothing for Partial.

    Args:
        ids: integers from 0 to v - 1. The row of an id outside of this range is NaN: ranks cannot
            raise an error for a value without waiting for the device.
        table: this rank's rows.
        axis: the axis, or several that act as one, over which the rows are sharded.
        dst: I or R if every rank gets the sum, S(i) for its shard along dimension i (sequence
            parallelism), Partial to leave the sum to the caller.

    Raises:
        LayerError: ids that are no integers, a table that is no matrix, or another `dst`.
        CollectiveError: outside a body, unknown axis, or a size that does not divide.

    Source: Shoeybi et al. 2019, "Megatron-LM", VocabParallelEmbedding;
    `torch.nn.functional.embedding`.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda ids, table: vocab_parallel_embedding(ids, table, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(), P("tp")), out_specs=P())
        >>> g(torch.tensor([3, 0]), torch.arange(8.0).reshape(4, 2))
        tensor([[6., 7.],
                [0., 1.]])
    """
    layout = read_layout("vocab_parallel_embedding", "dst", dst, "IRSP")
    if ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool or table.ndim != 2:
        raise LayerError(
            f"vocab_parallel_embedding takes integer ids and a table [v/r, d], not ids of "
            f"{ids.dtype} and a table {list(table.shape)}."
        )
    rows: Tensor = own_embeddings(axis)(ids, table)
    return rows if layout == Partial else redistribute(rows, axis, src=Partial, dst=layout)


def own_embeddings(axis: Axis) -> PerRank:
    """Makes the per-rank lookup: ids [...], table [v/r, d] -> [..., d], a pending sum."""

    @per_rank("...,vd->...d", over={"v": axis}, partial=axis)
    def embeddings_of_own_rows(ids: Tensor, table: Tensor) -> Tensor:
        local, owned = own_rows(ids, table.shape[0], axis, table.dtype)
        return functional.embedding(local, table) * owned.unsqueeze(-1)

    return embeddings_of_own_rows


def own_rows(ids: Tensor, num_rows: int, axis: Axis, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Finds ids among the rows of this rank.

    Returns:
        The index of each id among this rank's rows, any index if another rank has its row; and the
        weight of that row: 1 if this rank has it, 0 if another has it, NaN if it does not exist.
    """
    # Clamping takes half of the operations of comparing with both bounds, and keeps a valid index.
    ids = ids.long()  # a bound need not be a number of a smaller dtype
    local = ids - axis_index(axis) * num_rows
    index = local.clamp(0, num_rows - 1)
    owned = index == local
    exists = ids.clamp(0, num_rows * axis_size(axis) - 1) == ids
    return index, owned.to(dtype) / exists  # 0 / 0 is NaN

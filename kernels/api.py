"""Public overlapped matmuls: typed, differentiable, and unfused wherever overlap cannot pay.

They have the types of their unfused compositions, which a check interprets in their place.
"""

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from shardmap_torch.backends.products import multiply
from shardmap_torch.backends.vmap import BatchedBackend
from shardmap_torch.kernels.autograd import Unfused
from shardmap_torch.kernels.dispatch import (
    Runner,
    pairs,
    prepare_gather,
    prepare_product,
    prepared,
)
from shardmap_torch.kernels.planner import Overlap
from shardmap_torch.ops.arguments import Axis, read_axes
from shardmap_torch.types import TypeLike


@overload
def all_gather_matmul(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    dim: int = 0,
    bias: Tensor | None = None,
    chunks: int | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> Tensor: ...


@overload
def all_gather_matmul(
    x: Tensor,
    w: Sequence[Tensor],
    axis: Axis,
    *,
    dim: int = 0,
    bias: Sequence[Tensor | None] | None = None,
    chunks: int | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> tuple[Tensor, ...]: ...


def all_gather_matmul(
    x: Tensor,
    w: Tensor | Sequence[Tensor],
    axis: Axis,
    *,
    dim: int = 0,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    chunks: int | None = None,
    save_gathered: bool = True,
    overlap: Overlap = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """`all_gather(x, axis, dim=dim, dst=R) @ w + bias`, multiplying chunks as they arrive.

    Shape: x [..., k] with `dim` of size d, w [k, m, ...] gives [..., m, ...] with n*d there;
    with `dim` last, w is [n*k, m, ...]. Types: as its unfused composition: x is S(dim) or V.
    Backward, overlapped too: dx is reduce-scattered while it is produced and while dw is computed.
    Sends (n-1) * x.nbytes per rank forward and as much backward, and again as much backward with
    `save_gathered=False`, where it overlaps: the composition always saves the gathered x.

    Args:
        x: this rank's shard.
        w: a weight, or several that share one gather (q, k, v; gate, up).
        axis: an axis name, or several that act as one.
        dim: the dim of x that is gathered.
        bias: added to each row of the product; one per weight where there are several.
        chunks: number of chunks into which each rank's shard is split; by default as the cost model
            says, at most 8 of at least 128 rows each.
        save_gathered: keep the gathered x for the backward (n * x.nbytes beside x and w), or gather
            it again under the input gradient (nothing beside x and w until then, and n * x.nbytes
            for the time of the backward).
        overlap: "auto" overlaps where the cost model predicts a gain of at least 3 %, "require"
            wherever possible or raises, "off" never. `last_plan()` says what ran and why. In a
            body that torch.compile traces, "auto" is the composition, which inductor can fuse, and
            "require" raises. On a GPU only "require" overlaps, by code that has never run on one.

    Raises:
        KernelError: shapes that do not match, chunks that the shard has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, or an unknown axis.

    Source: Wang et al. 2023, "Overlap communication with dependent computation via
    decomposition"; Megatron-LM's sequence-parallel linear layer.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: all_gather_matmul(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
        >>> g(torch.arange(4.0).reshape(4, 1), torch.tensor([[1.0, 10.0]])).tolist()
        [[0.0, 0.0], [1.0, 10.0], [2.0, 20.0], [3.0, 30.0]]
    """
    ws, biases = pairs("all_gather_matmul", w, bias)
    options = dim, overlap, chunks, save_gathered
    prepared_call = prepared(prepare_gather, axis, options, (x, ws, biases), overlap)
    outs = _gather(prepared_call.runner, x, ws, biases)
    return outs[0] if isinstance(w, Tensor) else outs


def _gather(
    runner: Runner, x: Tensor, ws: Sequence[Tensor], biases: Sequence[Tensor | None]
) -> tuple[Tensor, ...]:
    """Multiplies by matrices, but where the composition multiplies by weights as they lie."""
    if isinstance(runner, Unfused) and isinstance(runner.backend, BatchedBackend):
        return runner.gather(x, ws, biases)
    matrices = [w.flatten(1) for w in ws]
    outs = runner.gather(x, matrices, [None if b is None else b.flatten() for b in biases])
    pairs_ = zip(outs, ws, strict=True)
    return tuple([y if w.ndim == 2 else y.unflatten(-1, w.shape[1:]) for y, w in pairs_])


def matmul_reduce_scatter(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    dim: int = 0,
    bias: Tensor | None = None,
    chunks: int | None = None,
    overlap: Overlap = "auto",
) -> Tensor:
    """`reduce_scatter(x @ w, axis, dim=dim) + bias`, sending chunks as they are made.

    Each addend travels once, straight to its owner, which adds them in rank order: results are
    equal from run to run. bfloat16 and float16 addends are added in float32 and rounded once.

    Shape: x [..., k], w [k, m] gives [..., m] with `dim` of size d divided by n. Types: as
    its unfused composition: the product is Partial (or V), the result S(dim). Backward:
    one gather of dy feeds dx and dw, chunk by chunk. Sends (n-1)/n * y.nbytes per rank forward and
    backward, y being the product.

    Args:
        x: this rank's features.
        w: this rank's rows of the weight, 2-D.
        axis: an axis name, or several that act as one.
        dim: the dim of the product that is sharded.
        bias: added once, after the reduction.
        chunks: as in `all_gather_matmul`, of each rank's block of the result.
        overlap: as in `all_gather_matmul`.

    Raises:
        KernelError: shapes that do not match, chunks that the block has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, unknown axis, or a size that does not divide.

    Source: as `all_gather_matmul`; the direct exchange from PyTorch's async tensor parallelism.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: matmul_reduce_scatter(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P("tp"))
        >>> g(torch.arange(4.0).reshape(2, 2), torch.ones(2, 1)).tolist()
        [[1.0], [5.0]]
    """
    options = "matmul_reduce_scatter", dim, overlap, chunks
    prepared_call = prepared(prepare_product, axis, options, (x, w, bias), overlap)
    y = prepared_call.runner.reduce(x, w)
    return y if bias is None else y + bias


def matmul_all_reduce(
    x: Tensor,
    w: Tensor,
    axis: Axis,
    *,
    dst: TypeLike,
    bias: Tensor | None = None,
    chunks: int | None = None,
    overlap: Overlap = "auto",
) -> Tensor:
    """`all_reduce(x @ w, axis, dst=dst) + bias`, a chunk at a time.

    While one chunk is multiplied, the one before is added on its owner (in rank order, bfloat16
    and float16 in float32) and sent to everyone. Equal on all ranks, bit for bit.

    Shape: x [..., k], w [k, m] gives [..., m]. Types: as its unfused composition: the product is
    Partial (or V), the result `dst`, R or I. Backward: for R an all-reduce of the cotangent, each
    finished chunk of which feeds dx and dw at once; for I there is nothing to send. Sends
    2(n-1)/n * y.nbytes per rank, for R as much backward.

    Args:
        x: this rank's features.
        w: this rank's rows of the weight, 2-D.
        axis: an axis name, or several that act as one.
        dst: R when the ranks use the result in different ways, I when all repeat one computation.
        bias: added once, after the reduction.
        chunks: as in `all_gather_matmul`, of each rank's share of the rows.
        overlap: as in `all_gather_matmul`.

    Raises:
        KernelError: shapes that do not match, chunks that the share has no rows for, overlap
            required but impossible, or a peer that is gone.
        CollectiveError: outside a body, or an unknown axis.

    Source: as `matmul_reduce_scatter`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: matmul_all_reduce(x, w, "tp", dst=I)
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P())
        >>> g(torch.arange(4.0).reshape(2, 2), torch.ones(2, 1)).tolist()
        [[1.0], [5.0]]
    """
    options = "matmul_all_reduce", dst, overlap, chunks
    prepared_call = prepared(prepare_product, axis, options, (x, w, bias), overlap)
    y = prepared_call.runner.reduce(x, w)
    return y if bias is None else y + bias


def local_matmul(x: Tensor, w: Tensor, axis: Axis) -> Tensor:
    """`x @ w` on each rank, which sends nothing; one matmul for all simulated ranks in a batch.

    Shape: x [..., k], w [k, n, ...] gives [..., n, ...]. Types: those of a matmul.

    Raises:
        CollectiveError: outside a body, or an unknown axis.
    """
    return multiply(read_axes("local_matmul", axis)[1].backend, x, w)

"""Linear layers whose weight is sharded over an axis: by columns, or by rows."""

from collections.abc import Sequence
from typing import overload

from torch import Tensor

from shardmap_torch.errors import LayerError
from shardmap_torch.kernels import (
    Overlap,
    all_gather_matmul,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from shardmap_torch.kernels.api import local_matmul
from shardmap_torch.nn.arguments import (
    check_inner,
    read_layout,
    replicate_weight,
    shard_of,
    to_replicate,
)
from shardmap_torch.ops import axis_size, convert
from shardmap_torch.ops.arguments import Axis, read_dim
from shardmap_torch.types import AxisType, I, Partial, R, TypeLike


@overload
def column_linear(
    x: Tensor,
    weight: Tensor,
    axis: Axis,
    *,
    bias: Tensor | None = None,
    src: TypeLike = I,
    overlap: Overlap = "auto",
) -> Tensor: ...


@overload
def column_linear(
    x: Tensor,
    weight: Sequence[Tensor],
    axis: Axis,
    *,
    bias: Sequence[Tensor | None] | None = None,
    src: TypeLike = I,
    overlap: Overlap = "auto",
) -> tuple[Tensor, ...]: ...


def column_linear(
    x: Tensor,
    weight: Tensor | Sequence[Tensor],
    axis: Axis,
    *,
    bias: Tensor | Sequence[Tensor | None] | None = None,
    src: TypeLike = I,
    overlap: Overlap = "auto",
) -> Tensor | tuple[Tensor, ...]:
    """Multiplies by a weight whose columns (output features) are sharded over `axis`.

    A fused weight, as of q, k and v or of gate and up, has its parts in a dimension of its own, so
    that sharding another one gives each rank its shard of every part: qkv [d, h, 3, k] is
    `P(None, "tp")`, gate_up [d, 2, f] is `P(None, None, "tp")`, and the result is `unbind`ed.

    Shape: x [..., d], weight [d, n/r, ...] gives [..., n/r, ...] on each of r ranks; with
    `src=S(i)` dimension i of x is t/r and that of the result t. Types: x is `src`, the weight and
    the bias are sharded (V), the result is sharded over its feature dimension. Backward: for
    `src=I` one all-reduce of dx, 2(r-1)/r * x.nbytes; for `src=R` none here, dx is a pending sum;
    for `src=S(i)` dx is reduce-scattered. Sends nothing forward, and (r-1) * x.nbytes for
    `src=S(i)`.

    Args:
        x: input features, all of them on every rank.
        weight: [d, ...], or several that share one gather of x, as of q, k and v.
        axis: the axis, or several that act as one, over which weights are sharded.
        bias: as the weight without its first dimension, sharded in the same way.
        src: I if x is equal on all ranks (tensor parallelism), R if the caller has converted it for
            several layers, S(i) if dimension i is sharded (sequence parallelism).
        overlap: whether the gather of `src=S(i)` overlaps with the matmul; see
            `shardmap_torch.kernels.all_gather_matmul`.

    Raises:
        LayerError: shapes that do not match, or another `src`.
        KernelError: overlap is required but impossible.
        CollectiveError: outside a body, or an unknown axis.

    Source: Shoeybi et al. 2019, "Megatron-LM", ColumnParallelLinear; for `src=S(i)` Korthikanti et
    al. 2022, "Reducing activation recomputation in large transformer models".

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: column_linear(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(), P(None, "tp")), out_specs=P(None, "tp"))
        >>> g(torch.ones(1, 2), torch.arange(8.0).reshape(2, 4))
        tensor([[ 4.,  6.,  8., 10.]])
    """
    weights = (weight,) if isinstance(weight, Tensor) else tuple(weight)
    biases = _biases(weights, bias if bias is None or not isinstance(bias, Tensor) else (bias,))
    layout = read_layout("column_linear", "src", src, "IRS")
    dim = None if layout.dim is None else read_dim("column_linear", "src dim", layout.dim, x.ndim)
    parts = axis_size(axis) if dim == x.ndim - 1 else 1
    for w in weights:
        _check_matrix("column_linear", w)
        check_inner("column_linear", x, w.shape[0] // parts, w, "weight")
    if dim is not None:
        outs = all_gather_matmul(x, weights, axis, dim=dim, bias=biases, overlap=overlap)
    else:
        x = to_replicate(x, axis) if layout == I else x
        products = [local_matmul(x, w, axis) for w in weights]
        pairs = zip(products, biases, strict=True)
        outs = tuple([y if b is None else y + b for y, b in pairs])
    return outs[0] if isinstance(weight, Tensor) else outs


def row_linear(
    x: Tensor,
    weight: Tensor,
    axis: Axis,
    *,
    bias: Tensor | None = None,
    dst: TypeLike = I,
    bias_type: TypeLike = I,
    overlap: Overlap = "auto",
) -> Tensor:
    """Multiplies by a weight whose rows (input features) are sharded over `axis`, and sums.

    Shape: x [..., n/r, ...], weight [n/r, ..., d] gives [..., d] on each of r ranks, summed over
    all dimensions of the weight but the last; for `dst=S(i)` dimension i is divided by r. Types:
    x and the weight are sharded (V), the bias is equal on all ranks, the result is `dst`. Backward:
    for `dst=I` nothing is sent, for `dst=R` the cotangent is all-reduced, for `dst=S(i)` gathered.
    Sends 2(r-1)/r * y.nbytes for I and R, (r-1)/r * y.nbytes for S(i), y being the sum; nothing
    for Partial.

    Args:
        x: input features, those of this rank.
        weight: the rows of these features, [features of x ..., d].
        axis: the axis, or several that act as one, over which both are sharded.
        bias: [d], equal on all ranks; added once, after the sum.
        dst: I or R if every rank gets the sum, S(i) for its shard along dimension i (sequence
            parallelism), Partial to leave the sum to the caller.
        bias_type: I, or R if the caller has converted all weights at once.
        overlap: whether the sum overlaps with the matmul; see
            `shardmap_torch.kernels.matmul_reduce_scatter`.

    Raises:
        LayerError: shapes that do not match, or another `dst`.
        KernelError: overlap is required but impossible.
        CollectiveError: outside a body, unknown axis, or a size that does not divide.

    Source: Shoeybi et al. 2019, "Megatron-LM", RowParallelLinear.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w, b: row_linear(x, w, "tp", bias=b)
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(None, "tp"), P("tp"), P()), out_specs=P())
        >>> g(torch.ones(1, 4), torch.ones(4, 2), torch.tensor([0.0, 0.5]))
        tensor([[4.0000, 4.5000]])
    """
    layout = read_layout("row_linear", "dst", dst, "IRSP")
    _check_matrix("row_linear", weight)
    bias_layout = read_layout("row_linear", "bias_type", bias_type, "IR")
    if layout == I and bias_layout == R:
        raise LayerError("row_linear: with dst=I the bias is I as well, not bias_type=R.")
    x, matrix = x.flatten(x.ndim - weight.ndim + 1), weight.flatten(0, -2)
    check_inner("row_linear", x, matrix.shape[0], weight, "weight")
    if layout.dim is not None:
        dim = read_dim("row_linear", "dst dim", layout.dim, x.ndim)
        y = matmul_reduce_scatter(x, matrix, axis, dim=dim, overlap=overlap)
    elif layout == Partial:
        y = local_matmul(x, matrix, axis)
    else:
        y = matmul_all_reduce(x, matrix, axis, dst=layout, overlap=overlap)
    return y if bias is None else y + _bias_after(bias, axis, layout, bias_layout, y.ndim)


def _bias_after(
    bias: Tensor, axis: Axis, layout: AxisType, bias_layout: AxisType, ndim: int
) -> Tensor:
    """Converts the bias of a row-parallel layer to the type of its result."""
    if layout.dim is not None and layout.dim % ndim == ndim - 1:
        return shard_of(bias, axis, bias_layout, "row_linear")
    if layout == Partial:
        return convert(bias, axis, src=bias_layout, dst=Partial)
    return bias if layout == I else replicate_weight(bias, axis, bias_layout, "row_linear")


def _biases(
    weights: tuple[Tensor, ...], bias: Sequence[Tensor | None] | None
) -> Sequence[Tensor | None]:
    if bias is None:
        return [None] * len(weights)
    shapes = [None if b is None else list(b.shape) for b in bias]
    expected = [list(w.shape[1:]) for w in weights]
    if len(bias) != len(weights) or any(
        have not in (None, shape) for have, shape in zip(shapes, expected, strict=True)
    ):
        raise LayerError(
            f"column_linear: biases have the shapes {shapes}, and the weights need {expected}."
        )
    return bias


def _check_matrix(name: str, weight: Tensor) -> None:
    if weight.ndim < 2:
        raise LayerError(
            f"{name}: weight {list(weight.shape)} has {weight.ndim} dimensions, and needs at "
            "least 2: input features and output features."
        )

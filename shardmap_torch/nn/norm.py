"""Normalisation over features, or over a batch, of activations whose other dims may be sharded."""

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.errors import LayerError
from shardmap_torch.nn.arguments import check_inner, num_rows, replicate_weight
from shardmap_torch.ops import all_reduce, convert
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.ops.body import axis_size
from shardmap_torch.types import I, R, TypeLike


def rms_norm(
    x: Tensor,
    weight: Tensor,
    axis: Axis | None = None,
    *,
    eps: float = 1e-6,
    weight_type: TypeLike = I,
) -> Tensor:
    """Divides each position by the root mean square of its features, and scales these.

    With `axis` the positions are sharded over it (sequence parallelism). Each rank then scales
    different positions, so that the gradient of the weight is summed over the ranks. Statistics are
    computed in float32 or better.

    Shape: x [..., d], weight [d] gives [..., d]. Types: the result has the types of x; with `axis`
    x is sharded over it along any dimension but the last, and the weight is `weight_type`.
    Backward: with `axis` and `weight_type=I` one all-reduce of weight.nbytes; else nothing. Sends
    nothing forward.

    Args:
        x: activations, with all features of each position.
        weight: the scale of each feature.
        axis: over which positions are sharded; None where every rank has all of x.
        eps: added to the mean square.
        weight_type: type of the weight over `axis`; R if the caller has converted all weights of a
            model at once.

    Raises:
        LayerError: shapes that do not match.
        CollectiveError: outside a body, or an unknown axis.

    Source: Zhang and Sennrich 2019, "Root mean square layer normalization";
    `torch.nn.functional.rms_norm`.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: rms_norm(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
        >>> g(torch.tensor([[3.0, 3.0], [5.0, -5.0]]), torch.tensor([1.0, 2.0]))
        tensor([[ 1.0000,  2.0000],
                [ 1.0000, -2.0000]])
    """
    check_inner("rms_norm", x, num_rows("rms_norm", weight, "weight"), weight, "weight")
    if axis is not None:
        weight = replicate_weight(weight, axis, weight_type, "rms_norm")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * scale).to(x.dtype) * weight


def layer_norm(
    x: Tensor,
    weight: Tensor,
    axis: Axis | None = None,
    *,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    weight_type: TypeLike = I,
) -> Tensor:
    """Normalises the features of each position to mean 0 and variance 1, scales and shifts them.

    Shape: x [..., d], weight and bias [d] gives [..., d]. Types, backward and bytes: as `rms_norm`;
    weight and bias are all-reduced one by one.

    Args:
        x: activations, with all features of each position.
        weight: the scale of each feature.
        axis: over which positions are sharded; None where every rank has all of x.
        bias: added to each feature.
        eps: added to the variance.
        weight_type: type of weight and bias over `axis`, as in `rms_norm`.

    Raises:
        LayerError: shapes that do not match.
        CollectiveError: outside a body, or an unknown axis.

    Source: Ba et al. 2016, "Layer normalization"; `torch.nn.functional.layer_norm`.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x, w: layer_norm(x, w, "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P("tp"))
        >>> g(torch.tensor([[1.0, 3.0], [9.0, 5.0]]), torch.ones(2)).round()
        tensor([[-1.,  1.],
                [ 1., -1.]])
    """
    check_inner("layer_norm", x, num_rows("layer_norm", weight, "weight"), weight, "weight")
    if axis is not None:
        weight = replicate_weight(weight, axis, weight_type, "layer_norm")
        bias = None if bias is None else replicate_weight(bias, axis, weight_type, "layer_norm")
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def batch_norm(
    x: Tensor,
    running_mean: Tensor,
    running_var: Tensor,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    axis: Axis | None = None,
    *,
    momentum: float = 0.1,
    eps: float = 1e-5,
    weight_type: TypeLike = I,
) -> tuple[Tensor, Tensor, Tensor]:
    """Normalises each channel over the whole batch, whose rows are sharded, in training.

    Mean and variance are those of all rows, as of SyncBatchNorm, in float32 or better. The running
    statistics are state: what goes in is not written, and the new ones are returned. In evaluation
    `torch.nn.functional.batch_norm` with them does the same on every shard.

    Shape: x [n, c, ...], the others [c] gives [n, c, ...], [c], [c]. Types: x and the result are
    sharded over `axis` along dim 0; running statistics are I, weight and bias `weight_type`. Sends
    two all-reduces of c numbers forward, and two backward; with `weight_type=I` one of each weight.

    Args:
        x: activations.
        running_mean: of each channel.
        running_var: of each channel, unbiased.
        weight: the scale of each channel.
        bias: added to each channel.
        axis: over which rows are sharded; None where every rank has all of x.
        momentum: the part of the new running statistics that is of this batch.
        eps: added to the variance.
        weight_type: type of weight and bias over `axis`, as in `rms_norm`.

    Returns:
        The result, and the new running mean and variance.

    Raises:
        LayerError: shapes that do not match, or one entry a channel in the whole batch.
        CollectiveError: outside a body, or an unknown axis.

    Source: Ioffe and Szegedy 2015, "Batch normalization"; `torch.nn.SyncBatchNorm`.

    Example:
        >>> from shardmap_torch import P, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> f = lambda x, mean, var: batch_norm(x, mean, var, axis="dp")
        >>> specs = {"in_specs": (P("dp"), P(), P()), "out_specs": (P("dp"), P(), P())}
        >>> y, mean, var = shard_map(f, mesh=mesh, **specs)(
        ...     torch.tensor([[1.0], [3.0]]), torch.zeros(1), torch.ones(1)
        ... )
        >>> y.round(), mean, var
        (tensor([[-1.],
                [ 1.]]), tensor([0.2000]), tensor([1.1000]))
    """
    scales = {"running_mean": running_mean, "running_var": running_var, "weight": weight}
    for name, value in {**scales, "bias": bias}.items():
        if x.ndim < 2 or (value is not None and value.shape != x.shape[1:2]):
            raise LayerError(
                f"batch_norm: x is [n, c, ...] and {name} [c]; they are {list(x.shape)} and "
                f"{None if value is None else list(value.shape)}."
            )
    dims, shape = [0, *range(2, x.ndim)], [1, -1, *[1] * (x.ndim - 2)]
    count = x.numel() // max(x.shape[1], 1) * (1 if axis is None else axis_size(axis))
    if count == 1:
        raise LayerError(f"batch_norm: the batch has one entry a channel, {list(x.shape)}.")
    wide = x.to(torch.promote_types(x.dtype, torch.float32))

    def of_batch(mean: Tensor) -> Tensor:
        return mean if axis is None else all_reduce(mean, axis, dst=R, op="mean")

    mean = of_batch(wide.mean(dims))
    centered = wide - mean.view(shape)
    var = of_batch(centered.square().mean(dims))
    y = centered * torch.rsqrt(var + eps).view(shape)
    for scale, apply in ((weight, torch.mul), (bias, torch.add)):
        if scale is not None:
            if axis is not None:
                scale = replicate_weight(scale, axis, weight_type, "batch_norm")
            y = apply(y, scale.view(shape))

    def moved(running: Tensor, new: Tensor) -> Tensor:
        new = new.detach() if axis is None else convert(new.detach(), axis, src=R, dst=I)
        dtype = torch.promote_types(running.dtype, new.dtype)
        return running.to(dtype).lerp(new.to(dtype), momentum).to(running.dtype)

    unbiased = var * (count / (count - 1))
    return y.to(x.dtype), moved(running_mean, mean), moved(running_var, unbiased)

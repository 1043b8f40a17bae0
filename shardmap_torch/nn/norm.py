"""Normalisation over features, of activations whose other dimensions may be sharded."""

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch.nn.arguments import check_inner, num_rows, replicate_weight
from shardmap_torch.ops.arguments import Axis
from shardmap_torch.types import I, TypeLike


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

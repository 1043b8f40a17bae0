"""Dropout with an explicit key: the types of the mask are those of the key and the spec."""

import torch
from torch import Tensor

from shardmap_torch.errors import ShardMapError, SpecError
from shardmap_torch.ops import axis_size
from shardmap_torch.random.draws import bernoulli
from shardmap_torch.random.keys import Key
from shardmap_torch.spec import P


def dropout(
    key: Key, x: Tensor, p: float = 0.5, *, spec: P | None = None, training: bool = True
) -> Tensor:
    """Sets entries to zero with probability `p`, and divides the others by 1 - p.

    Shape: that of `x`. The mask has the types of the key, and is S(i) over the axes of `spec`; the
    result joins them with those of `x`. Sends nothing.

    Args:
        key: draw from it once; a key of type K gives equal masks on all ranks, one that is folded
            over an axis gives each of its ranks another mask.
        x: of a floating dtype.
        p: probability that an entry is dropped.
        spec: how `x` is sharded: the mask is this rank's shard of the mask for the global `x`, as
            one device draws it. The right choice for activations; also under check="global".
        training: False returns `x` as it is.

    Raises:
        ShardMapError: `p` is not in [0, 1), or `key` is no key.
        SpecError: `spec` has more entries than `x` has dims, or names a partial axis.
        CollectiveError: `spec` names axes outside a body, or axes that are not bound in it.

    Source: `torch.nn.functional.dropout`, `flax.linen.Dropout`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, random, shard_map
        >>> mesh = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P(), P("dp")), out_specs=P("dp"), check="global")
        ... def f(key, x):
        ...     return random.dropout(key, x, 0.5, spec=P("dp"))
        >>> x, key = torch.ones(2, 4), random.key(1)
        >>> torch.equal(f(key, x), random.dropout(key, x, 0.5))
        True
    """
    if not 0.0 <= p < 1.0:
        raise ShardMapError(f"random.dropout: p is a probability in [0, 1), not {p}.")
    if not training or p == 0.0:
        return x
    kept = bernoulli(key, 1.0 - p, _global_shape(x, spec), spec=spec, device=x.device)
    return torch.where(kept, x / (1.0 - p), 0.0)


def _global_shape(x: Tensor, spec: P | None) -> list[int]:
    sizes = list(x.shape)
    if spec is None:
        return sizes
    if len(spec.entries) > x.ndim:
        raise SpecError(f"random.dropout: {spec!r} is for more dims than the {x.ndim} of x.")
    for dim, axes in spec.sharded_dims:
        sizes[dim] *= axis_size(axes)
    return sizes

"""The collectives, slices and loops of `jax.lax`: its names, arguments and defaults.

As in `jax.shard_map` with `check_vma=True`, an operand that is equal on all ranks is cast to a
varying one first, so that `psum` of it is n times the value. A result of type I that meets what
varies, where a gradient flows, is cast to R, so that its gradient is summed: the checker finds
which ones have to be. These are the only implicit casts in a body.

An operand that is neither I nor R yet is cast as I, as in JAX: the gradient of the cast is summed
over the ranks, so that a gradient taken in the body is finished. Where a program does not type with
that, all its casts are tried as of R, whose gradients are left unsummed. With `check="global"` what
JAX calls varying stays R where it is equal.

The gradient of a cast depends on the type before it. Values carry no type at run time; the
checker finds it, and each run reads it from the checked program. With `check=False` it is given by
`src=`, and by default operands vary. Types are I, R, V, Partial or JAX's words for them:
"invarying", "reduced", "varying", "unreduced".

Arguments that the collectives share: `x` is a tensor or a pytree of tensors (and numbers, for
reductions); `axis_name` an axis name, or several that act as one; `src` the type of `x` along the
axis. All raise `CollectiveError` outside of a body, and for an unknown axis, dim or type; a checked
body raises `ShardTypeError` where the type is another one than `src=` says or the collective takes.
`axis_index_groups` is refused: a result of each group's own has no type along the axis. An axis of
their own (`make_mesh` with `views=`) types it, and sends to the group alone.

Source: `jax.lax`.
"""

from shardmap_torch.contracts import export
from shardmap_torch.errors import CollectiveError
from shardmap_torch.lax.collectives import (
    all_gather,
    all_to_all,
    axis_index,
    axis_size,
    pbroadcast,
    pcast,
    pmax,
    pmean,
    pmin,
    ppermute,
    pshuffle,
    psum,
    psum_scatter,
    pswapaxes,
    pvary,
    stop_gradient,
)
from shardmap_torch.lax.control import (
    associative_scan,
    cond,
    fori_loop,
    map,
    scan,
    switch,
    while_loop,
)
from shardmap_torch.lax.slicing import (
    dynamic_index_in_dim,
    dynamic_slice,
    dynamic_slice_in_dim,
    dynamic_update_index_in_dim,
    dynamic_update_slice,
    dynamic_update_slice_in_dim,
)

__all__ = [
    "all_gather",
    "all_to_all",
    "associative_scan",
    "axis_index",
    "axis_size",
    "cond",
    "dynamic_index_in_dim",
    "dynamic_slice",
    "dynamic_slice_in_dim",
    "dynamic_update_index_in_dim",
    "dynamic_update_slice",
    "dynamic_update_slice_in_dim",
    "fori_loop",
    "map",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
    "scan",
    "stop_gradient",
    "switch",
    "while_loop",
]

export(globals(), __all__, CollectiveError)

"""The collectives of `jax.lax`: its names, arguments and defaults.

As in `jax.shard_map` with `check_vma=True`, an operand that is equal on all ranks is cast to a
varying one first, so that `psum` of it is n times the value. These are the only implicit casts in a
body. The gradient of a cast depends on the type before it. Values carry no type at run time; the
checker finds it, and each run reads it from the checked program. With `check=False` it is given by
`src=`, and by default operands vary. Types are I, R, V, Partial or JAX's words for them:
"invarying", "reduced", "varying", "unreduced".

`axis_index_groups` splits an axis into groups of equal size, each with its own result. The result
therefore varies over the axis, also where it would be equal without groups. It is computed by one
`ppermute` for each member but one: the minimum of bytes, in g-1 messages.
"""

from shardmap_torch.lax.cast import pcast, pvary
from shardmap_torch.lax.extremum import pmax, pmin
from shardmap_torch.lax.move import (
    all_gather,
    all_to_all,
    pbroadcast,
    ppermute,
    pshuffle,
    pswapaxes,
)
from shardmap_torch.lax.sum import pmean, psum, psum_scatter
from shardmap_torch.ops.index import axis_index, axis_size

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
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
]

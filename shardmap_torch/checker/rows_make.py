"""Tensors made from nothing, and operations that overwrite or only look at a shape."""

from typing import Final

import torch

import shardmap_torch.threefry  # noqa: F401 - defines the operator
from shardmap_torch.checker.row import Row
from shardmap_torch.checker.rows_common import ZERO, each, merged, sums

_SHAPE: Final = Row(unread=("self",))

ZEROS: Final = merged(
    each(ZERO, "zeros empty.memory_format empty_strided empty_permuted _efficientzerotensor"),
    each(
        # Memory not yet written may hold anything; whoever reads it before writing errs anyway.
        Row(zero=True, unread=("self",)),
        "zeros_like new_zeros empty_like new_empty new_empty_strided zero",
    ),
)

FILLED: Final = merged(
    each(sums("fill_value"), "full"),
    each(sums("fill_value", unread=("self",)), "full_like new_full"),
    each(sums("value", unread=("self",)), "fill.Scalar fill.Tensor"),
    each(sums("s"), "scalar_tensor"),
    each(sums("src", unread=("self",)), "copy"),
    each(_SHAPE, "ones_like new_ones"),
)

# Their tags say that they draw.
DRAWN: Final = merged(
    each(_SHAPE, "rand_like randn_like randint_like randint_like.low_dtype randint_like.Tensor"),
    each(_SHAPE, "bernoulli_.float bernoulli_.Tensor uniform_ normal_ exponential_ geometric_"),
    each(_SHAPE, "random_ random_.from random_.to cauchy_ log_normal_"),
)

# A function of its operands, and no draw: equal keys and counters give equal numbers.
COUNTED: Final = {torch.ops.shardmap_torch.threefry.default: Row()}

ROWS: Final = merged(ZEROS, FILLED, DRAWN, COUNTED)

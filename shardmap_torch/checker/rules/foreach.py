"""Operations on lists of tensors, processed position by position, and fused optimiser steps."""

from dataclasses import replace
from typing import Final

from shardmap_torch.checker.rules.builders import SELF, each, merged, product, sums
from shardmap_torch.checker.rules.rule import Row

_PLAIN: Final = Row(zipped=True)


def _lists(row: Row) -> Row:
    return replace(row, zipped=True)


LINEAR: Final = merged(
    each(_lists(sums("self", "other")), "_foreach_add.List _foreach_sub.List _foreach_add.Tensor"),
    each(_lists(sums("self", "scalar")), "_foreach_add.Scalar _foreach_sub.Scalar"),
    each(_lists(sums("self", "scalars")), "_foreach_add.ScalarList _foreach_sub.ScalarList"),
    each(_lists(product("self", "other")), "_foreach_mul.List _foreach_mul.Tensor"),
    each(_lists(product("self", "mat2")), "_foreach_mm"),
    each(_lists(product("self", "scalar")), "_foreach_mul.Scalar"),
    each(_lists(product("self", "scalars")), "_foreach_mul.ScalarList"),
    each(_lists(SELF), "_foreach_div.List _foreach_div.Tensor _foreach_div.Scalar"),
    each(_lists(SELF), "_foreach_div.ScalarList _foreach_neg _foreach_clone"),
    each(_lists(sums("self", "tensors1")), "_foreach_lerp.List _foreach_lerp.Scalar"),
    each(_lists(sums("self", "tensors1")), "_foreach_lerp.ScalarList"),
    each(
        _lists(Row(linear=(("self",), ("tensor1", "tensor2")))),
        "_foreach_addcmul.Scalar _foreach_addcmul.ScalarList",
    ),
    each(
        _lists(sums("self", "tensor1")),
        "_foreach_addcdiv.Scalar _foreach_addcdiv.ScalarList",
    ),
    each(
        _lists(Row(linear=(("self",), ("tensor1", "tensor2", "scalars")))),
        "_foreach_addcmul.Tensor",
    ),
    each(_lists(Row(linear=(("self",), ("tensor1", "scalars")))), "_foreach_addcdiv.Tensor"),
    each(_lists(sums("src", unread=("self",))), "_foreach_copy"),
    each(_lists(Row(zero=True, unread=("self",))), "_foreach_zero"),
)

# Not linear: the row only says that one position does not read another.
POSITIONS: Final = each(
    _PLAIN,
    " ".join(
        f"_foreach_{name}"
        for name in (
            "abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p"
            " log2 max reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
            " clamp_max.List clamp_max.Scalar clamp_max.ScalarList clamp_min.List clamp_min.Scalar"
            " clamp_min.ScalarList maximum.List maximum.Scalar maximum.ScalarList minimum.List"
            " minimum.Scalar minimum.ScalarList pow.List pow.Scalar pow.ScalarList"
            " pow.ScalarAndTensor norm.Scalar powsum.Scalar"
        ).split()
    ),
)

FUSED: Final = merged(
    each(_PLAIN, "_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr"),
    each(_PLAIN, "_fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr"),
)

ROWS: Final = merged(LINEAR, POSITIONS, FUSED)

"""Arithmetic, sums, casts and other pointwise operations that are linear, and their backwards."""

from typing import Final

from shardmap_torch.checker.rules.builders import GRAD, SELF, each, merged, product, sums
from shardmap_torch.checker.rules.rule import Arguments, Row


def _unrounded(arguments: Arguments) -> bool:
    return arguments["rounding_mode"] is None


SUMS: Final = merged(
    each(sums("self", "other"), "add.Tensor add.Scalar sub.Tensor sub.Scalar"),
    each(sums("self", "other"), "rsub.Tensor rsub.Scalar"),
    # self + weight * (end - self): the weight scales.
    each(sums("self", "end"), "lerp.Scalar lerp.Tensor"),
    each(Row(linear=(("self",), ("tensor1", "tensor2"))), "addcmul"),
    each(sums("self", "tensor1"), "addcdiv"),
    each(sums("self", "other"), "where.self where.ScalarOther where.ScalarSelf where.Scalar"),
    each(sums("self", "value"), "masked_fill.Scalar masked_fill.Tensor"),
    each(sums("real", "imag"), "complex"),
)

PRODUCTS: Final = merged(
    each(product("self", "other"), "mul.Tensor mul.Scalar"),
    each(SELF, "div.Tensor div.Scalar"),
    each(Row(linear=(("self",),), when=_unrounded), "div.Tensor_mode div.Scalar_mode"),
    each(SELF, "ldexp.Tensor xlogy.Tensor xlogy.Scalar_Other special_xlog1py"),
    each(sums("abs"), "polar"),
)

UNARY: Final = merged(
    each(SELF, "neg positive deg2rad rad2deg _conj_physical"),
    each(SELF, "_to_copy clone _lazy_clone lift contiguous"),
    each(SELF, "sum sum.dim_IntList mean mean.dim cumsum trace"),
)

# Formulas of the backward: linear in the gradient and in nothing else.
BACKWARD: Final = merged(
    each(GRAD, "sigmoid_backward tanh_backward threshold_backward logit_backward elu_backward"),
    each(GRAD, "gelu_backward silu_backward mish_backward glu_backward log_sigmoid_backward"),
    each(GRAD, "hardsigmoid_backward hardswish_backward hardtanh_backward leaky_relu_backward"),
    each(GRAD, "softplus_backward softshrink_backward rrelu_with_noise_backward"),
    each(GRAD, "_prelu_kernel_backward native_dropout_backward"),
    each(sums("grad_out"), "hardshrink_backward"),
)

ROWS: Final = merged(SUMS, PRODUCTS, UNARY, BACKWARD)

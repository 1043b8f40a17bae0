"""Loosened rows that no call refutes, and why."""

from collections.abc import Mapping
from typing import Final

# The loosened row is true, or refuses what the row accepts: the table does not need the claim.
TRUE: Final[Mapping[str, frozenset[str]]] = {
    # A number stands in the term: a K addend beside a P is refused, and 0 is neutral.
    "mul.Scalar": frozenset({"self + other"}),
    "_foreach_mul.Scalar": frozenset({"self + scalar"}),
    "_foreach_mul.ScalarList": frozenset({"self + scalars"}),
    "scatter.value_reduce": frozenset({"whenever"}),
    # Linear in a weight or scale too, which no model sums over ranks.
    "_embedding_bag_backward.default": frozenset({"grad * per_sample_weights", "unread offsets"}),
    "_embedding_bag_dense_backward.default": frozenset({"grad * per_sample_weights"}),
    "_embedding_bag_per_sample_weights_backward.default": frozenset(
        {"grad * weight", "unread offsets"}
    ),
    "native_layer_norm_backward.default": frozenset(
        {
            "result 0: grad_out * weight",
            "result 1: grad_out * rstd",
            # The bias is there for its shape.
            *(f"result {i}: {what}" for i in range(3) for what in ("+ bias", "unread bias")),
            *(f"result {i}: grad_out * bias" for i in range(3)),
            # These read more than the row says.
            *("result 1 as 0", "result 2 as 0", "result 2 as 1"),
        }
    ),
    "native_group_norm_backward.default": frozenset(
        {
            *("result 0: grad_out * weight", "result 1: grad_out * rstd"),
            *("result 1 as 0", "result 2 as 0", "result 2 as 1"),
        }
    ),
    "nll_loss_forward.default": frozenset({"result 0: self * weight", "result 1: + weight"}),
    "nll_loss2d_forward.default": frozenset({"result 0: self * weight", "result 1: + weight"}),
    "nll_loss_backward.default": frozenset({"grad_output * weight"}),
    "nll_loss2d_backward.default": frozenset({"grad_output * weight"}),
    "binary_cross_entropy_backward.default": frozenset({"grad_output * weight"}),
    "multi_margin_loss_backward.default": frozenset({"grad_output * weight"}),
    "_pdist_backward.default": frozenset({"grad * self"}),
    "_foreach_addcmul.Tensor": frozenset({"tensor1*tensor2 * scalars"}),
    "_foreach_addcdiv.Tensor": frozenset({"tensor1 * scalars"}),
    # The operand is there for its shape.
    **{
        f"{name}_backward.default": frozenset({"+ self", "unread self"})
        for name in (
            *("max_pool2d_with_indices", "max_pool3d_with_indices", "adaptive_max_pool2d"),
            *("adaptive_max_pool3d", "fractional_max_pool2d", "fractional_max_pool3d"),
        )
    },
    # Written, not read.
    "rrelu_with_noise.default": frozenset({"unread noise"}),
    # Only shapes and dtypes are looked at.
    "_fused_sdp_choice.default": frozenset(
        {
            *(f"{how} {name}" for how in ("+", "unread") for name in ("query", "key", "value")),
            *("+ attn_mask", "unread attn_mask", "zero"),
        }
    ),
}

# No other value of the operand can be tried on a CPU, so that nothing is shown.
UNTRIED: Final[Mapping[str, frozenset[str]]] = {
    # No floating operand: a P cannot come here.
    "where.Scalar": frozenset(
        {"+ condition", "self * condition", "other * condition", "all one product"}
    ),
    # Not implemented with a bias.
    "_grouped_mm.default": frozenset({"+ bias", "self*mat2 * bias", "unread bias"}),
    # The status differs for singular matrices only.
    "_linalg_solve_ex.default": frozenset({"result 3: unread A"}),
    # Memory of another backend.
    "batch_norm_backward.default": frozenset({"+ reserve", "grad_out * reserve", "unread reserve"}),
    # The kernels check that the values are 0 or 1, or probabilities, or a bound.
    "multilabel_margin_loss_backward.default": frozenset(
        {"+ is_target", "grad_output * is_target", "unread is_target"}
    ),
    "bernoulli_.Tensor": frozenset({"+ p", "unread p"}),
    "randint_like.Tensor": frozenset({"unread high"}),
    # The kernel does not drop.
    "_scaled_dot_product_flash_attention_for_cpu.default": frozenset({"never draws"}),
    # Any number but zero is an overflow, on every rank.
    **{
        f"_fused_{name}": frozenset({"unread found_inf"})
        for kind in ("adam", "adamw", "sgd", "adagrad")
        for name in (f"{kind}.default", f"{kind}.tensor_lr")
    },
}

"""Normalisation, softmax, losses, attention, pooling and resampling, mostly their backwards."""

from typing import Final

from shardmap_torch.checker.rules.rule import (
    GRAD,
    SELF,
    Arguments,
    Row,
    backwards,
    each,
    merged,
    never,
    overloads,
    product,
    sums,
)

_OUT: Final = ("grad_out",)

NORMALISATION: Final = merged(
    each(GRAD, "_softmax_backward_data _log_softmax_backward_data _masked_softmax_backward"),
    each(
        # d input, d weight, d bias. The statistics are functions of the input and are read with it.
        # The bias is there for its shape.
        Row(
            results=(
                product("grad_out", "weight", unread=("bias",)),
                product("grad_out", "rstd", unread=("weight", "bias")),
                sums("grad_out", unread=("input", "mean", "rstd", "weight", "bias")),
            )
        ),
        "native_layer_norm_backward",
    ),
    each(
        Row(
            results=(
                product("grad_out", "weight"),
                product("grad_out", "rstd", unread=("weight",)),
                sums("grad_out", unread=("input", "mean", "rstd", "weight")),
            )
        ),
        "native_group_norm_backward",
    ),
    each(Row(results=(sums(*_OUT), sums(*_OUT, unread=("weight",)))), "_fused_rms_norm_backward"),
    each(sums(*_OUT), "native_batch_norm_backward batch_norm_backward"),
    each(GRAD, "cudnn_batch_norm_backward"),
    each(sums("grad_w"), "_weight_norm_interface_backward"),
)

HIDDEN_WRITES: Final = dict.fromkeys(
    each(Row(), "native_batch_norm cudnn_batch_norm miopen_batch_norm"),
    ("running_mean", "running_var"),
)
"""Arguments an overload writes when `training` is true, although its schema does not say so."""

# The gradient is the first argument, which torch 2.14 renamed.
_DISTANCE: Final = sums(overloads("_cdist_backward")[0]._schema.arguments[0].name)
_NLL_LOSS: Final = Row(
    results=(
        sums("self"),
        # The total weight of the targets.
        sums("weight", unread=("self",)),
    )
)

LOSSES: Final = merged(
    each(GRAD, "mse_loss_backward smooth_l1_loss_backward huber_loss_backward"),
    each(GRAD, "soft_margin_loss_backward multilabel_margin_loss_backward"),
    each(
        product("grad_output", "weight"), "binary_cross_entropy_backward multi_margin_loss_backward"
    ),
    each(_NLL_LOSS, "nll_loss_forward nll_loss2d_forward"),
    each(
        product("grad_output", "weight", unread=("self",)), "nll_loss_backward nll_loss2d_backward"
    ),
    each(sums("grad"), "_ctc_loss_backward _ctc_loss_backward.Tensor"),
    each(_DISTANCE, "_cdist_backward _pdist_backward"),
)


def _trains(arguments: Arguments) -> bool:
    return arguments["train"] is not False


# Tagged as random, but they draw only where they drop.
ATTENTION: Final = merged(
    each(
        Row(draws=lambda arguments: arguments["dropout_p"] > 0),
        "_scaled_dot_product_flash_attention "
        "_scaled_dot_product_efficient_attention _scaled_dot_product_cudnn_attention "
        "_scaled_dot_product_flash_attention_for_cpu "
        "_flash_attention_forward _efficient_attention_forward",
    ),
    each(
        sums(*_OUT),
        "_scaled_dot_product_flash_attention_backward "
        "_scaled_dot_product_flash_attention_for_cpu_backward "
        "_flash_attention_backward",
    ),
    # The backwards replay the forward's seed and draw nothing, although they have the tag.
    each(Row(linear=(_OUT,), draws=never), "_scaled_dot_product_cudnn_attention_backward"),
    each(
        Row(linear=(("grad_out_",),), draws=never),
        "_scaled_dot_product_efficient_attention_backward _efficient_attention_backward",
    ),
    # Which kernel to take: decided by shapes, dtypes and settings.
    each(Row(draws=never, unread=("query", "key", "value", "attn_mask")), "_fused_sdp_choice"),
)

DROPOUT: Final = merged(
    each(
        Row(
            results=(
                Row(linear=(("input",),), draws=_trains),
                Row(unread=("input",), draws=_trains),
            )
        ),
        "native_dropout",
    ),
    each(
        Row(draws=lambda arguments: bool(arguments["training"])),
        "rrelu_with_noise rrelu_with_noise_functional",
    ),
)

POOLING: Final = merged(
    each(SELF, "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d"),
    each(SELF, "max_unpool2d max_unpool3d"),
    each(
        sums("grad_output", unread=("self",)),
        backwards(
            "avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
            # The indices are the positions of the maxima.
            "max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d "
            "adaptive_max_pool3d fractional_max_pool2d fractional_max_pool3d"
        ),
    ),
)

_GRID_BACKWARD: Final = Row(
    results=(sums("grad_output", unread=("input",)), product("grad_output", "input"))
)

_UPSAMPLED: Final = (
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d upsample_linear1d"
    " upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d"
    " _upsample_nearest_exact1d _upsample_nearest_exact2d _upsample_nearest_exact3d"
    " _upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa"
)

RESAMPLING: Final = merged(
    each(SELF, _UPSAMPLED),
    each(GRAD, backwards(_UPSAMPLED)),
    each(sums("input"), "grid_sampler_2d grid_sampler_3d"),
    each(_GRID_BACKWARD, "grid_sampler_2d_backward grid_sampler_3d_backward"),
    each(sums("theta"), "affine_grid_generator"),
)

ROWS: Final = merged(NORMALISATION, LOSSES, ATTENTION, DROPOUT, POOLING, RESAMPLING)

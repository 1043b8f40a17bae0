"""Operations that move values about: copies of views, joining, indexing, scattering, padding."""

from typing import Final

from shardmap_torch.checker.rules.builders import GRAD, SELF, each, merged, product, sums
from shardmap_torch.checker.rules.rule import Arguments, Row

# Views proper share their storage and need no row; these are their copying forms. `view_copy.dtype`
# is not among them: the bits of a pending sum mean nothing.
COPIES: Final = merged(
    each(SELF, "_unsafe_view view_copy _reshape_copy _reshape_alias_copy alias_copy detach_copy"),
    each(SELF, "as_strided_copy diagonal_copy expand_copy narrow_copy permute_copy t_copy"),
    each(SELF, "select_copy.int slice_copy.Tensor split_copy.Tensor split_with_sizes_copy"),
    each(
        SELF, "squeeze_copy squeeze_copy.dim squeeze_copy.dims transpose_copy.int unbind_copy.int"
    ),
    each(SELF, "unfold_copy unsqueeze_copy view_as_real_copy view_as_complex_copy _conj_copy"),
    each(SELF, "_neg_view_copy lift_fresh_copy unsafe_split.Tensor unsafe_split_with_sizes"),
    # These write shapes and strides, no values.
    each(SELF, "squeeze_ squeeze_.dim squeeze_.dims unsqueeze_ t_ transpose_ as_strided_ detach_"),
)

REARRANGED: Final = merged(
    each(sums("tensors"), "cat stack block_diag _chunk_cat"),
    each(SELF, "flip roll rot90 repeat tril triu diag_embed"),
    each(SELF, "pixel_shuffle pixel_unshuffle channel_shuffle"),
)

# The backwards of views: the gradient, placed among zeros.
VIEW_BACKWARD: Final = merged(
    each(GRAD, "select_backward slice_backward diagonal_backward"),
    each(sums("grad_in"), "unfold_backward"),
)

PADDING: Final = merged(
    each(sums("self", "value"), "constant_pad_nd"),
    each(SELF, "reflection_pad1d reflection_pad2d reflection_pad3d"),
    each(SELF, "replication_pad1d replication_pad2d replication_pad3d"),
    each(
        # The operand is there for its shape.
        sums("grad_output", unread=("self",)),
        "reflection_pad1d_backward reflection_pad2d_backward reflection_pad3d_backward "
        "replication_pad1d_backward replication_pad2d_backward replication_pad3d_backward",
    ),
)

READING: Final = merged(
    each(SELF, "index.Tensor _unsafe_index.Tensor index_select gather take"),
    each(sums("self", "fill"), "_unsafe_masked_index"),
    each(sums("weight"), "embedding"),
    each(GRAD, "embedding_dense_backward masked_scatter_backward"),
    each(
        product("grad", "per_sample_weights"),
        "_embedding_bag_backward _embedding_bag_dense_backward",
    ),
    each(product("grad", "weight"), "_embedding_bag_per_sample_weights_backward"),
)


def _adds(arguments: Arguments) -> bool:
    return arguments["reduce"] in ("add", "sum", "mean")


def _is_linear_backward(arguments: Arguments) -> bool:
    # Of ties for "max" and "min", torch divides positive gradients only by their number.
    return arguments["reduce"] in ("sum", "mean", "prod")


def _averages(arguments: Arguments) -> bool:
    return bool(arguments["reduce"] == "mean")


WRITING: Final = merged(
    each(sums("self", "src"), "scatter.src scatter_add select_scatter slice_scatter"),
    each(sums("self", "src"), "diagonal_scatter as_strided_scatter"),
    each(sums("self", "value"), "scatter.value index_fill.int_Scalar index_fill.int_Tensor"),
    each(Row(linear=(("self",), ("src",)), when=_adds), "scatter.reduce scatter_reduce.two"),
    each(Row(linear=(("self",), ("value",)), when=_adds), "scatter.value_reduce"),
    each(sums("self", "source"), "index_add index_copy masked_scatter put"),
    each(Row(linear=(("self",), ("source",)), when=_averages), "index_reduce"),
    each(sums("self", "values"), "index_put _unsafe_index_put _index_put_impl"),
    each(sums("self", "values"), "_unsafe_masked_index_put_accumulate"),
    each(Row(linear=(("grad",),), when=_is_linear_backward), "_segment_reduce_backward"),
)

ROWS: Final = merged(COPIES, REARRANGED, VIEW_BACKWARD, PADDING, READING, WRITING)

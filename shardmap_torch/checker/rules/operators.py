"""Rows of arithmetic, matrix products, layout, factories, and operations on lists of tensors."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from shardmap_torch.checker.rules.rule import (
    GRAD,
    SELF,
    ZERO,
    Arguments,
    Row,
    backwards,
    each,
    merged,
    overloads,
    product,
    sums,
)
from shardmap_torch.core.torch_private.engine import OpOverload

# -------------------------------------------------------------------------------- pointwise


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
    each(
        Row(linear=(("self",),), when=lambda arguments: arguments["rounding_mode"] is None),
        "div.Tensor_mode div.Scalar_mode",
    ),
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
    each(GRAD, backwards("sigmoid tanh threshold logit elu gelu silu mish glu log_sigmoid")),
    each(GRAD, backwards("hardsigmoid hardswish hardtanh leaky_relu softplus softshrink")),
    each(GRAD, backwards("rrelu_with_noise _prelu_kernel native_dropout")),
    each(sums("grad_out"), "hardshrink_backward"),
)


# --------------------------------------------------------------------------------- matrices

MATMUL: Final = merged(
    each(product("self", "mat2"), "mm bmm"),
    each(product("self", "other"), "matmul linalg_cross vdot"),
    each(product("self", "tensor"), "dot"),
    each(product("self", "vec"), "mv"),
    each(Row(linear=(("self",), ("mat1", "mat2"))), "addmm"),
    each(Row(linear=(("self",), ("mat", "vec"))), "addmv"),
    each(Row(linear=(("self",), ("vec1", "vec2"))), "addr"),
    each(Row(linear=(("self",), ("batch1", "batch2"))), "baddbmm addbmm"),
    each(Row(linear=(("input", "weight"), ("bias",))), "linear"),
    each(product("i1", "i2", "i3"), "_trilinear"),
    # Ragged groups: every row of the result is one group's product.
    each(product("self", "mat2"), "_grouped_mm"),
)

# d input, d weight and d bias: a product that leaves one operand out each.
_CONVOLUTION_BACKWARD: Final = Row(
    results=(
        product("grad_output", "weight", unread=("input",)),
        product("grad_output", "input", unread=("weight",)),
        sums("grad_output", unread=("input", "weight")),
    )
)

CONVOLUTION: Final = merged(
    each(Row(linear=(("input", "weight"), ("bias",))), "convolution"),
    each(_CONVOLUTION_BACKWARD, "convolution_backward"),
    each(SELF, "im2col col2im"),
)

_SOLVE: Final = Row(
    results=(
        sums("B"),
        # The factors, pivots and status of the matrix.
        *(Row(unread=("B",)) for _ in range(3)),
    )
)

LINALG: Final = merged(
    each(_SOLVE, "_linalg_solve_ex"),
    each(sums("B"), "linalg_solve_triangular linalg_lu_solve linalg_ldl_solve"),
    each(Row(results=(sums("self"), sums("A", unread=("self",)))), "triangular_solve"),
    each(sums("self"), "cholesky_solve"),
    each(sums("input3"), "ormqr"),
    each(SELF, "_fft_c2c _fft_c2r _fft_r2c"),
)


# ----------------------------------------------------------------------------------- layout

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

_PADDED: Final = (
    "reflection_pad1d reflection_pad2d reflection_pad3d"
    " replication_pad1d replication_pad2d replication_pad3d"
)

PADDING: Final = merged(
    each(sums("self", "value"), "constant_pad_nd"),
    each(SELF, _PADDED),
    each(sums("grad_output", unread=("self",)), backwards(_PADDED)),  # it is there for its shape
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


WRITING: Final = merged(
    each(sums("self", "src"), "scatter.src scatter_add select_scatter slice_scatter"),
    each(sums("self", "src"), "diagonal_scatter as_strided_scatter"),
    each(sums("self", "value"), "scatter.value index_fill.int_Scalar index_fill.int_Tensor"),
    each(Row(linear=(("self",), ("src",)), when=_adds), "scatter.reduce scatter_reduce.two"),
    each(Row(linear=(("self",), ("value",)), when=_adds), "scatter.value_reduce"),
    each(sums("self", "source"), "index_add index_copy masked_scatter put"),
    each(
        Row(linear=(("self",), ("source",)), when=lambda given: given["reduce"] == "mean"),
        "index_reduce",
    ),
    each(sums("self", "values"), "index_put _unsafe_index_put _index_put_impl"),
    each(sums("self", "values"), "_unsafe_masked_index_put_accumulate"),
    each(Row(linear=(("grad",),), when=_is_linear_backward), "_segment_reduce_backward"),
)


# -------------------------------------------------------------------------------- factories

_SHAPE: Final = Row(unread=("self",))

ZEROS: Final = merged(
    each(ZERO, "zeros empty.memory_format empty_strided empty_permuted _efficientzerotensor"),
    each(
        # Memory not yet written may hold anything; to read it before writing is wrong anyway.
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

# These have the tag of operations that draw random numbers.
DRAWN: Final = merged(
    each(_SHAPE, "rand_like randn_like randint_like randint_like.low_dtype randint_like.Tensor"),
    each(_SHAPE, "bernoulli_.float bernoulli_.Tensor uniform_ normal_ exponential_ geometric_"),
    each(_SHAPE, "random_ random_.from random_.to cauchy_ log_normal_"),
)

_STRIDED: Final = Row(refuse="only strided tensors are typed, not sparse, nested or packed ones")
_STORAGE: Final = Row(refuse="it gives a tensor other memory, which types belong to")

# Operations that have no place in a body, whatever their operands are.
REFUSED: Final = merged(
    each(_STRIDED, "_to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc _to_sparse_bsr"),
    each(_STRIDED, "_to_sparse_bsc to_mkldnn quantize_per_tensor quantize_per_channel"),
    each(_STRIDED, "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors"),
    each(_STRIDED, "sparse_compressed_tensor.comp_plain_value_size _embedding_bag_sparse_backward"),
    each(_STRIDED, "_nested_tensor_from_tensor_list _nested_view_from_buffer"),
    each(_STORAGE, "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor"),
    each(_STORAGE, "set_.source_Tensor_storage_offset set_"),
)


# ------------------------------------------------------------------------- lists of tensors

_PLAIN: Final = Row(zipped=True)


def _on_lists(op: OpOverload, items: Mapping[OpOverload, Row]) -> Row:
    """Returns the row of an operator on lists: that of the operator on their items, renamed.

    Arguments are matched by position, since names differ: `other` of `add.Scalar` is `scalar`. One
    without a row is not linear, and then the row only says that no position reads another.
    """
    base = op._schema.name.replace("_foreach_", "")
    of_items = next((known for known in items if known._schema.name == base), None)
    if of_items is None:
        return _PLAIN
    theirs, own = ([a.name for a in each._schema.arguments] for each in (of_items, op))
    names, row = dict(zip(theirs, own, strict=False)), items[of_items]
    terms = tuple(tuple(names[each] for each in term) for term in row.linear)
    unread = tuple(names[each] for each in row.unread)
    return replace(row, linear=terms, unread=unread, zipped=True)


_ITEMS: Final = {**SUMS, **PRODUCTS, **UNARY, **MATMUL, **ZEROS, **FILLED}
_NAMES: Final = (
    "add.List add.Tensor add.Scalar add.ScalarList sub.List sub.Scalar sub.ScalarList"
    " mul.List mul.Tensor mul.Scalar mul.ScalarList div.List div.Tensor div.Scalar div.ScalarList"
    " mm neg clone copy zero lerp.List lerp.Scalar lerp.ScalarList"
    " addcmul.Scalar addcmul.ScalarList addcdiv.Scalar addcdiv.ScalarList"
    " abs acos asin atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p"
    " log2 max reciprocal round rsqrt sigmoid sign sin sinh sqrt tan tanh trunc"
    " clamp_max.List clamp_max.Scalar clamp_max.ScalarList clamp_min.List clamp_min.Scalar"
    " clamp_min.ScalarList maximum.List maximum.Scalar maximum.ScalarList minimum.List"
    " minimum.Scalar minimum.ScalarList pow.List pow.Scalar pow.ScalarList"
    " pow.ScalarAndTensor norm.Scalar powsum.Scalar"
)

LISTS: Final = merged(
    {op: _on_lists(op, _ITEMS) for name in _NAMES.split() for op in overloads(f"_foreach_{name}")},
    # Here the factor is a tensor too, which their namesakes take as a number.
    each(
        Row(linear=(("self",), ("tensor1", "tensor2", "scalars")), zipped=True),
        "_foreach_addcmul.Tensor",
    ),
    each(Row(linear=(("self",), ("tensor1", "scalars")), zipped=True), "_foreach_addcdiv.Tensor"),
)

FUSED: Final = merged(
    each(_PLAIN, "_fused_adam _fused_adam.tensor_lr _fused_adamw _fused_adamw.tensor_lr"),
    each(_PLAIN, "_fused_sgd _fused_sgd.tensor_lr _fused_adagrad _fused_adagrad.tensor_lr"),
)

OWN: Final[Mapping[str, Row]] = MappingProxyType(
    {
        # A function of its operands that draws nothing: equal keys and counters, equal numbers.
        "shardmap_torch.threefry.default": Row(),
        # In each group a product; the sizes of the groups select rows.
        "shardmap_torch.grouped_matmul.default": product("rows", "weights"),
        "shardmap_torch.grouped_outer.default": product("left", "right"),
    }
)
"""Rows of this package's operators, by name: what first uses them defines them."""

ROWS: Final[dict[OpOverload, Row]] = merged(
    *(SUMS, PRODUCTS, UNARY, BACKWARD),
    *(MATMUL, CONVOLUTION, LINALG),
    *(COPIES, REARRANGED, VIEW_BACKWARD, PADDING, READING, WRITING),
    *(ZEROS, FILLED, DRAWN, REFUSED),
    *(LISTS, FUSED),
)

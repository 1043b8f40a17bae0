"""Tensors made from nothing, operations that overwrite or only read a shape, and refused ones."""

from typing import Final

from shardmap_torch.checker.rules.builders import ZERO, each, merged, sums
from shardmap_torch.checker.rules.rule import Row

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

# A function of its operands that draws nothing: equal keys and counters give equal numbers.
COUNTED: Final = {"shardmap_torch.threefry.default": Row()}

ROWS: Final = merged(ZEROS, FILLED, DRAWN, REFUSED)

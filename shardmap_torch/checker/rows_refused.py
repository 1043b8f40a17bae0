"""Operations that have no place in a body, whatever their operands are."""

from typing import Final

from shardmap_torch.checker.row import Row
from shardmap_torch.checker.rows_common import each, merged

_STRIDED: Final = Row(refuse="only strided tensors are typed, not sparse, nested or packed ones")
_STORAGE: Final = Row(refuse="it gives a tensor other memory, which types belong to")

ROWS: Final = merged(
    each(_STRIDED, "_to_sparse _to_sparse.sparse_dim _to_sparse_csr _to_sparse_csc _to_sparse_bsr"),
    each(_STRIDED, "_to_sparse_bsc to_mkldnn quantize_per_tensor quantize_per_channel"),
    each(_STRIDED, "_sparse_coo_tensor_with_dims _sparse_coo_tensor_with_dims_and_tensors"),
    each(_STRIDED, "sparse_compressed_tensor.comp_plain_value_size _embedding_bag_sparse_backward"),
    each(_STRIDED, "_nested_tensor_from_tensor_list _nested_view_from_buffer"),
    each(_STORAGE, "set_.source_Storage set_.source_Storage_storage_offset set_.source_Tensor"),
    each(_STORAGE, "set_.source_Tensor_storage_offset set_"),
)

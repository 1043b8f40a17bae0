"""Rows that the interpreter's own tests stand on: arithmetic, matmul, sums, factories, copies."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch._ops import OpOverload

from shardmap_torch.checker.row import Arguments, Row

aten = torch.ops.aten

SELF: Final = Row(linear=(("self",),))
ZERO: Final = Row(zero=True)


def _unrounded(arguments: Arguments) -> bool:
    return arguments["rounding_mode"] is None


ROWS: Final[Mapping[OpOverload, Row]] = MappingProxyType(
    {
        aten.add.Tensor: Row(linear=(("self",), ("other",))),
        aten.sub.Tensor: Row(linear=(("self",), ("other",))),
        aten.mul.Tensor: Row(linear=(("self", "other"),)),
        aten.div.Tensor: SELF,
        aten.div.Tensor_mode: Row(linear=(("self",),), when=_unrounded),
        aten.neg.default: SELF,
        aten.mm.default: Row(linear=(("self", "mat2"),)),
        aten.bmm.default: Row(linear=(("self", "mat2"),)),
        aten.addmm.default: Row(linear=(("self",), ("mat1", "mat2"))),
        aten.sum.default: SELF,
        aten.sum.dim_IntList: SELF,
        aten.mean.default: SELF,
        aten.mean.dim: SELF,
        aten.clone.default: SELF,
        aten._to_copy.default: SELF,
        aten.copy.default: Row(linear=(("src",),), unread=("self",)),
        aten.cat.default: Row(linear=(("tensors",),)),
        aten.where.self: Row(linear=(("self",), ("other",))),
        aten.masked_fill.Scalar: Row(linear=(("self",), ("value",))),
        aten.embedding.default: Row(linear=(("weight",),)),
        aten.embedding_dense_backward.default: Row(linear=(("grad_output",),)),
        aten.zeros.default: ZERO,
        aten.empty.memory_format: ZERO,
        aten.zeros_like.default: Row(zero=True, unread=("self",)),
        aten.empty_like.default: Row(zero=True, unread=("self",)),
        aten.new_zeros.default: Row(zero=True, unread=("self",)),
        aten.new_empty.default: Row(zero=True, unread=("self",)),
        aten.ones_like.default: Row(unread=("self",)),
        aten.full_like.default: Row(linear=(("fill_value",),), unread=("self",)),
        aten.full.default: Row(linear=(("fill_value",),)),
    }
)

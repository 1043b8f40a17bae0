"""Tensor-parallel matmuls that overlap their communication with their own computation.

In a checked body an operand of another type than in the composition is a `ShardTypeError`.
"""

from shardmap_torch.contracts import export
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.api import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from shardmap_torch.kernels.planner import Overlap, Plan, last_plan

__all__ = [
    "Overlap",
    "Plan",
    "all_gather_matmul",
    "last_plan",
    "matmul_all_reduce",
    "matmul_reduce_scatter",
]

export(globals(), __all__, KernelError)

"""Typed, differentiable collectives; imported as `shardmap_torch.ops`.

Each function checks its arguments and issues rows of `shardmap_torch.collectives.table`.
"""

from inspect import signature

from shardmap_torch.ops.asking import axis_group
from shardmap_torch.ops.body import axis_index, axis_size
from shardmap_torch.ops.cast import convert, redistribute, reinterpret
from shardmap_torch.ops.gather import all_gather, all_to_all, broadcast
from shardmap_torch.ops.permute import ppermute, shift
from shardmap_torch.ops.ragged import ragged_all_to_all
from shardmap_torch.ops.reduce import all_reduce, reduce_scatter
from shardmap_torch.ops.reshard import reshard

for _function in (all_gather, all_reduce, broadcast):
    # Who leaves out `dst` is told by `read_type` what it says, not by Python that it is missing.
    setattr(_function, "__signature__", signature(_function))  # noqa: B010  # as it is written
    _function.__kwdefaults__ = {**(_function.__kwdefaults__ or {}), "dst": None}

__all__ = [
    "all_gather",
    "all_reduce",
    "all_to_all",
    "axis_group",
    "axis_index",
    "axis_size",
    "broadcast",
    "convert",
    "ppermute",
    "ragged_all_to_all",
    "redistribute",
    "reduce_scatter",
    "reinterpret",
    "reshard",
    "shift",
]

"""Automatic axes: global-view code whose communication DTensor's sharding propagation places."""

from shardmap_torch.automatic.api import auto, mark_sharding
from shardmap_torch.automatic.report import AutoReport, Redistribution

__all__ = ["AutoReport", "Redistribution", "auto", "mark_sharding"]

"""Automatic axes: global-view code whose communication DTensor's sharding propagation places."""

from shardmap_torch.automatic.api import auto, mark_sharding
from shardmap_torch.automatic.recording import Redistribution, Redistributions, redistributions
from shardmap_torch.contracts import export
from shardmap_torch.errors import SpecError

__all__ = ["Redistribution", "Redistributions", "auto", "mark_sharding", "redistributions"]

export(globals(), __all__, SpecError)

"""Checkpoints, complete or absent whenever a run is killed: `save`, `load`, `latest`."""

from shardmap_torch.contracts import export
from shardmap_torch.errors import CheckpointError
from shardmap_torch.saving.api import latest, load, save

__all__ = ["latest", "load", "save"]

export(globals(), __all__, CheckpointError)

"""Checkpoints, complete or absent whenever a run is killed: `save`, `load`, `latest`."""

from shardmap_torch.saving.api import latest, load, save

__all__ = ["latest", "load", "save"]

"""Checkpoints that survive kills: `save`, `load`, `latest`."""

from shardmap_torch.saving.api import latest, load, save

__all__ = ["latest", "load", "save"]

"""JAX-inspired functional `shard_map` for PyTorch."""

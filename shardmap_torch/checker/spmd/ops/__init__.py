"""Sharding rules of operations that do more than go from entry to entry, by family."""

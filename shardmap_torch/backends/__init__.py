"""Backends: run the ranks of each kind of mesh batched, in threads, or over process groups."""

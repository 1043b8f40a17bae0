"""Calls and a simulated MLP in shardmap_torch, PyTorch's own ways, spmd_types and JAX, in one run.

Each library runs in a process of its own, which times what it is asked for; one process waits while
another is timed. `python -m benchmarks.peers` starts them.
"""

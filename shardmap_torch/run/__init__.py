"""How a checked call runs: on this rank's process, on threads, or batched."""

"""Runs of checked calls: on this rank's process, on threads, or batched."""

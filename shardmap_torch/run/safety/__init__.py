"""Safeguards around a checked run: purity, equal inputs, shared memory, repeated checks."""

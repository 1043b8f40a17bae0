"""Runtimes that run calls on each kind of mesh, and the verdicts of checked calls."""

"""Replayed calls: the operators of a body are recorded once, and run without its Python."""

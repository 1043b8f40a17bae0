"""Torch functions that take a number out of a tensor, interpreted as others that do not."""

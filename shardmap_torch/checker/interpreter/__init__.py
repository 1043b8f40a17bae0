"""Abstract interpreter: types every value of a body, forward and backward, on fake tensors."""

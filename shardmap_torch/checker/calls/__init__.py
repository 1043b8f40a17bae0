"""Results of ATen calls on fake tensors, and calls that are remembered."""

"""Types of collectives, and comparisons of kernels with their compositions."""

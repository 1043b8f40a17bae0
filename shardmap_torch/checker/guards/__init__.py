"""Guards of a verdict: whether it still holds for the code, the values and the run at hand."""

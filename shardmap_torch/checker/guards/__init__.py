"""Guards: check that a verdict still holds for the current code, captured values and run."""

"""Abstract interpretation of a body: the type of every value, forward and backward."""

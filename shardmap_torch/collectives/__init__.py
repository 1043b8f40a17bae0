"""The specification of the collectives, and the autograd Functions made from it."""

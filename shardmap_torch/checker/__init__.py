"""Abstract interpretation of a body and of the backward that autograd derives from it."""

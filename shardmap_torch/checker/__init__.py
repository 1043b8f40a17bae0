"""The checker: abstract interpretation of a body and of the backward that autograd derives."""

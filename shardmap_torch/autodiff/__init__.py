"""Gradients taken in a body, at the cost of plain autograd where ranks run eager code."""

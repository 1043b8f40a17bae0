"""Gradients taken in a body: grad, value_and_grad, vjp."""

"""The record of what a body does, and its evaluation on numbers without the body."""

"""Typing rules of ATen operators, as rows of tables."""

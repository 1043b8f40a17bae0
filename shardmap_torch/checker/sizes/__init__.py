"""Verdicts for many sizes: sizes and numbers of arguments as symbols, and guards on them."""

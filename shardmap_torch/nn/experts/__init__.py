"""Experts that get as many rows as a router sends them, and no padding."""

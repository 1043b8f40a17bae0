"""Verification of one call: every path, forward, backward and across the boundary."""

"""Safeguards around a checked run: purity, equal inputs, memory shared with arguments."""

"""Torch functions that are interpreted as others, and what memory their results may share."""

"""Stored: verdicts that a later process can use, on disk by the content of what was checked."""

"""Batches that a body divides into microbatches, and how these are added up."""

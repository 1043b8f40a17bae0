"""Llama as pure functions over tensor-parallel layers, and a pretrained one to run."""

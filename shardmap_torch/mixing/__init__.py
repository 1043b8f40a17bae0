"""Automatic axes: bodies of process-group meshes whose values stay sharded over unbound axes.

A body that binds a subset of the axes gets DTensors over the others. torch's propagation runs its
operations, and collectives over the bound axes run on the local tensors.
"""

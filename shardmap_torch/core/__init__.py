"""Helpers without knowledge of meshes or types: caching, pytrees, storage, source locations."""

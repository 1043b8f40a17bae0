"""A script in the way of nanoGPT, for one device and for a mesh; docs/nanogpt.md has the diff."""

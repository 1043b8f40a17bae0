"""Collectives overlapped with matrix products; imported as `shardmap_torch.kernels`."""

"""Typed, differentiable collectives; imported as `shardmap_torch.ops`."""

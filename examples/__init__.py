"""Programs that show shardmap_torch at work; each runs as a script."""

"""The parts that the layers share: arguments, per-rank regions, and the ring of keys."""

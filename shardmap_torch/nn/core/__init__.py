"""Parts that several layers share: arguments, per-rank regions, and ring attention's steps."""

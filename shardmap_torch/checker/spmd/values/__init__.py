"""Values of which more is known than their layout: positions, and blocks of a dim."""

"""Values of which more is known than their layout: positions, ids of a range, maxima."""

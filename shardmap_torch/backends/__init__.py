"""How the ranks of each kind of mesh run: batched, in threads, or over process groups."""

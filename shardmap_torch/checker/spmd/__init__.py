"""Global strictness: the sharding of every value, held against the program on one device."""

"""Global strictness: how every value is sharded, compared with the program on one device."""

"""The sizes of random tests: small in `make test`, large in `make fuzz`."""

import os
from typing import Final, TypeVar

X = TypeVar("X")

FUZZ: Final = "SHARDMAP_FUZZ" in os.environ


def sized(quick: X, full: X) -> X:
    """Returns `full` in `make fuzz`, else `quick`."""
    return full if FUZZ else quick

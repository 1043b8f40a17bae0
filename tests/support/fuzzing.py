"""The sizes of random tests: small in `make test`, large in `make fuzz`."""

import os
from collections.abc import Iterable
from typing import Any, Final, TypeVar

import pytest

X = TypeVar("X")

FUZZ: Final = "SHARDMAP_FUZZ" in os.environ


def sized(quick: X, full: X) -> X:
    """Returns `full` in `make fuzz`, else `quick`."""
    return full if FUZZ else quick


def sampled(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Returns `values` as those of a parameter, of which `make test` takes `quick` alone."""
    return [
        each if each in quick else pytest.param(each, marks=pytest.mark.fuzz) for each in values
    ]

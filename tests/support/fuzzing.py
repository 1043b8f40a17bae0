"""The sizes of random tests: small in `make test`, large in `make fuzz`."""

import os
from collections import defaultdict
from collections.abc import Iterable
from typing import Any, Final, TypeVar
from zlib import crc32

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


def left_out(items: Iterable[pytest.Item]) -> set[pytest.Item]:
    """Returns the cases of tests marked `sample(n, *names)` but for `n`.

    Those of these names come first. Others are told by a hash of theirs, so that a new case takes
    the place of one at most. Raises UsageError if a name is that of no case.
    """
    cases: dict[Any, dict[str, pytest.Item]] = defaultdict(dict)
    for item in items:
        mark = item.get_closest_marker("sample")
        if mark and not item.get_closest_marker("fuzz"):
            test, _, case = item.name.removesuffix("]").partition("[")
            cases[item.path, test, mark.args][case] = item
    out: set[pytest.Item] = set()
    for (path, test, (number, *first)), found in cases.items():
        if unknown := sorted({*first} - found.keys()):
            raise pytest.UsageError(f"{path}: sample names no case of {test}: {unknown}")
        by_hash = sorted(found, key=lambda case: crc32(found[case].name.encode()))
        ranked = sorted(by_hash, key=lambda case: case not in first)
        out.update(found[case] for case in ranked[number:])
    return out

"""Random programs of one kind, most of them nearly right: refused, or what one device computes."""

from collections import Counter
from collections.abc import Callable
from typing import Final

import pytest

from tests.checker.support import (
    accumulations,
    position_programs,
    softmax_programs,
    vocabulary_programs,
)
from tests.support.fuzzing import sized

Kind = tuple[Callable[[int], str], range, int]

KINDS: Final[dict[str, Kind]] = {
    "positions that a rank counts": (position_programs.outcome_of, range(8), 2_100),
    "softmaxes over shards": (softmax_programs.outcome_of, range(5), 2_000),
    "lookups in parts of a vocabulary": (vocabulary_programs.outcome_of, range(10, 15), 2_010),
    "loops over microbatches": (accumulations.outcome_of, range(5), 400),
}
"""A check and a run of the program of a seed; seeds of `make test`, and how many there are."""

CASES: Final = [
    (kind, seeds)
    for kind, (_, few, many) in KINDS.items()
    for seeds in sized([few], [range(at, at + 100) for at in range(0, many, 100)])
]


@pytest.mark.parametrize(("kind", "seeds"), CASES, ids=str)
def test_what_is_accepted_is_what_one_device_computes(kind: str, seeds: range) -> None:
    outcome_of, *_ = KINDS[kind]
    outcomes = {seed: outcome_of(seed) for seed in seeds}
    assert [seed for seed, found in outcomes.items() if found == "wrong"] == []
    assert set(Counter(outcomes.values())) == {"right", "refused"}

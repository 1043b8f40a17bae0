"""Fates of programs with one collective changed: refused, equal, another program, or missed.

Run, which writes a section of docs/coverage.md: .venv/bin/python -m tests.checker.support.score
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

from shardmap_torch import ShardMapError
from tests.checker.support import page
from tests.checker.support.programs import (
    RANKS,
    SHAPES,
    Outcome,
    Program,
    grown,
    is_tame,
    judged,
    same,
    simulated,
    truth,
)

REFUSED: Final = "refused"
EQUAL: Final = "equal"
OTHER: Final = "another program"
MISSED: Final = "missed"


def fate_of(program: Program, mutant: Program, shape: Sequence[int]) -> str:
    """Returns the fate of a mutant that was made of an accepted program.

    Refused: the checker, or a collective, rejects it. Equal: on 2, 3 and 4 ranks it has the values
    and gradients of the program that it was made of. Another program: what each type promises, and
    the gradients of what it computes, hold; it only computes something else, such as a V that was
    not permuted. Missed: a promise or a gradient is wrong.
    """
    try:
        if judged(mutant, shape)[0] is None:
            return REFUSED
        fates = {_fate_on(program, mutant, each) for each in RANKS[len(shape)]}
    except ShardMapError:
        return REFUSED
    return next(fate for fate in (MISSED, REFUSED, OTHER, EQUAL) if fate in fates)


def _fate_on(program: Program, mutant: Program, shape: Sequence[int]) -> str:
    expected, promised = meant(program, shape), meant(mutant, shape)
    if promised is None:
        return REFUSED
    actual = simulated(mutant, shape, "ranks")
    if promised.broken or not same(actual, promised):
        return MISSED
    return EQUAL if expected is not None and same(actual, expected) else OTHER


def meant(program: Program, shape: Sequence[int]) -> Outcome | None:
    """Computes a program by its types; None where the checker refuses it."""
    notes, _ = judged(program, shape)
    return None if notes is None else truth(program, shape, notes)


@dataclass
class Score:
    """Fates by the kind of change, and what was seen of the programs themselves.

    Attributes:
        programs: how many were grown.
        steps: of all of them; `collectives` of these are collectives, where they are counted.
        refused: how many steps were drawn that the checker refused.
        fates: how many mutants of each kind came to each end.
        wrong: programs and mutants that the checker accepted wrongly.
    """

    programs: int = 0
    steps: int = 0
    collectives: int = 0
    refused: int = 0
    fates: dict[str, Counter[str]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def note(self, what: str, fate: str) -> None:
        """Counts one mutant."""
        self.fates.setdefault(what, Counter())[fate] += 1


def wrongs_of(program: Program, shape: Sequence[int]) -> list[str]:
    """Lists the promises that an accepted program breaks, on rank threads and batched."""
    promised = meant(program, shape)
    assert promised is not None
    if not is_tame(promised):
        return []
    wrong = list(promised.broken)
    for strategy in ("ranks", "auto"):
        if not same(simulated(program, shape, strategy), promised):
            wrong.append(f"{strategy}: wrong values or gradients")
    return [f"{shape}: {each}\n{program}" for each in wrong]


def scored(seeds: Sequence[int], num_steps: int, num_mutants: int) -> Score:
    """Grows one program a seed, and changes some of its collectives."""
    score = Score()
    for seed in seeds:
        rng = random.Random(seed)
        shape = SHAPES[seed % len(SHAPES)]
        growth = grown(rng, shape, num_steps)
        program = growth.program
        score.programs += 1
        score.steps += len(program.steps)
        score.refused += growth.refused
        score.wrong += wrongs_of(program, shape)
        mutants = list(program.mutants())
        for what, mutant in rng.sample(mutants, min(len(mutants), num_mutants)):
            fate = fate_of(program, mutant, shape)
            score.note(what, fate)
            if fate == MISSED:
                score.wrong.append(f"{what} {shape}: {mutant}\nof {program}")
    return score


SEEDS: Final = range(200)


def section(score: Score) -> str:
    """Writes the section on random programs of the page on coverage."""
    ends = (REFUSED, EQUAL, OTHER, MISSED)
    rows = [(what, *map(fates.__getitem__, ends)) for what, fates in sorted(score.fates.items())]
    text = (
        f"{score.programs} programs of {score.steps} steps were grown on one and two axes; "
        f"{score.refused} steps that were drawn were refused. On rank threads and on "
        f"the mesh's own strategy {len(score.wrong)} of the programs and their mutants had "
        "other values or gradients than their types promise."
    )
    mutants = (
        "Mutants have one collective changed. *equal*: accepted, and the same values and "
        "gradients as the program on 2, 3 and 4 ranks. *another program*: accepted, and right "
        "for what it computes, which is something else: local strictness does not know what "
        "was meant, and a V that is not permuted is a V. *missed*: accepted, and wrong."
    )
    table = page.table(("changed", *ends), rows)
    return page.section("Random programs", "score", text, mutants, table)


def main() -> int:
    """Scores programs and their mutants, and writes the page's section."""
    page.begin()
    score = scored(SEEDS, 6, 6)
    return page.finish(section(score), score.wrong)


if __name__ == "__main__":
    sys.exit(main())

"""Scores of random programs by class of mistakes.

Run, which writes a section of docs/coverage.md:
.venv/bin/python -m tests.checker.support.classes.report
"""

import random
import sys
from collections.abc import Callable, Mapping
from typing import Final

from tests.checker.support import page
from tests.checker.support.classes import (
    backwards,
    captured,
    flows,
    hooks,
    impurity,
    randomness,
    training,
)
from tests.checker.support.classes.trials import EQUAL, REFUSED, WRONG, Tally, Trial, tally

CLASSES: Final[Mapping[str, Callable[[random.Random], Trial]]] = {
    "backwards of one's own": backwards.drawn,
    "captured state": captured.drawn,
    "cut gradients": flows.drawn,
    "hooks": hooks.drawn,
    "impurity": impurity.drawn,
    "randomness": randomness.drawn,
    "randomness of shards": randomness.sharded,
    "mutants of training steps": training.mutant,
}
"""Generators of programs."""

TRUTHS: Final[Mapping[str, str]] = {
    "backwards of one's own": 'one device, for values and gradients under `check="global"`',
    "captured state": "the same body under a mapping that was never checked, after each change",
    "cut gradients": 'one device, for values and gradients under `check="global"`',
    "hooks": 'one device under `check="global"`; single ranks for batched ones under `"local"`',
    "impurity": "the same body on one device, with state of its own for each rank, twice",
    "randomness": "the same bits by each strategy, equal and different over axes as typed",
    "randomness of shards": 'the bits of one device, under `check="global"`',
    "mutants of training steps": "one device, for what neither strictness refuses",
}
SEEDS: Final = 1_000


def section(tallies: Mapping[str, Tally], seeds: int) -> str:
    """Writes the section on classes of mistakes of the page on coverage."""
    rows = [
        (name, TRUTHS[name], *(fates[EQUAL], fates[REFUSED], each.rights[REFUSED], fates[WRONG]))
        for name, each in tallies.items()
        for fates in [each.fates]
    ]
    text = (
        f"{seeds} programs of each class were drawn, from seeds 0 to {seeds - 1}. Each has to "
        "be refused or to be what the truth says. *right, refused*: right however it is "
        "sharded by the way it was made, as what is linear in each entry. *wrong*: accepted, "
        "and not the truth, or ended in another error than a refusal."
    )
    head = ("class", "truth", "equal", "refused", "right, refused", "wrong")
    return page.section(
        "Classes of mistakes", f"classes.report {seeds}", text, page.table(head, rows)
    )


def main() -> int:
    """Writes the page's section; a number on the command line says how many seeds are tried."""
    seeds = page.begin(SEEDS)
    tallies = {name: tally(draw, range(seeds)) for name, draw in CLASSES.items()}
    wrong = [f"{name}: {each}" for name, found in tallies.items() for each in found.wrong]
    return page.finish(section(tallies, seeds), wrong)


if __name__ == "__main__":
    sys.exit(main())

"""Scores of random programs by class of mistakes.

Run, which writes a section of docs/coverage.md:
.venv/bin/python -m tests.checker.support.classes.report
"""

import random
import sys
import warnings
from collections.abc import Callable, Mapping
from typing import Final

import torch

from tests.checker.support.classes import (
    backwards,
    captured,
    flows,
    hooks,
    impurity,
    randomness,
    training,
)
from tests.checker.support.classes.trials import (
    EQUAL,
    REFUSED,
    WRONG,
    Tally,
    Trial,
    tally,
)
from tests.checker.support.page import commit, write

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


def section(tallies: Mapping[str, Tally], seeds: int, commit: str) -> str:
    """Writes the section on classes of mistakes of the page on coverage."""
    rows = [
        f"| {name} | {TRUTHS[name]} | {found.fates[EQUAL]} | {found.fates[REFUSED]} | "
        f"{found.rights[REFUSED]} | {found.fates[WRONG]} |"
        for name, found in tallies.items()
    ]
    return "\n".join(
        [
            "## Classes of mistakes",
            "",
            f"Generated at commit {commit} "
            f"by `python -m tests.checker.support.classes.report {seeds}`; do not edit.",
            "",
            f"{seeds} programs of each class were drawn, from seeds 0 to {seeds - 1}. Each has to "
            "be refused or to be what the truth says. *right, refused*: right however it is "
            "sharded by the way it was made, as what is linear in each entry. *wrong*: accepted, "
            "and not the truth, or ended in another error than a refusal.",
            "",
            "| class | truth | equal | refused | right, refused | wrong |",
            "|---|---|---|---|---|---|",
            *rows,
            "",
        ]
    )


def main() -> int:
    """Writes the page's section; a number on the command line says how many seeds are tried."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    seeds = int(sys.argv[1]) if len(sys.argv) > 1 else SEEDS
    tallies = {name: tally(draw, range(seeds)) for name, draw in CLASSES.items()}
    write(section(tallies, seeds, commit()))
    wrong = [f"{name}: {each}" for name, found in tallies.items() for each in found.wrong]
    print("\n".join(wrong) or "no program is wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())

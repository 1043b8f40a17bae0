"""Fates under check="global" of programs with one collective changed.

Writes a section of docs/coverage.md:
.venv/bin/python -m tests.checker.support.global_score
"""

import random
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from shardmap_torch import ShardMapError
from tests.checker.support import page
from tests.checker.support.global_programs import (
    CALLS,
    OTHERS,
    Program,
    drawn_inputs,
    grown,
    mutants,
)
from tests.checker.support.score import EQUAL, MISSED, REFUSED, Score

PROGRAMS: Final = 100
ENDS: Final = (REFUSED, EQUAL, MISSED)


def fate_of(mutant: Program, inputs: Sequence[Tensor]) -> str:
    """Returns the fate of a mutant, which on one device is the program that it was made of.

    Refused: on the program's own mesh, or on one of 2, 3 and 4 ranks an axis. Equal: on all of them
    it has the values and gradients of one device. Missed: it is accepted on one of them, and has
    others there.
    """
    if mutant.exits(inputs) is None:
        return REFUSED
    meshes = (mutant.sizes, *OTHERS)
    fates = {_fate_on(replace(mutant, sizes=each), inputs) for each in meshes}
    return next(fate for fate in (MISSED, REFUSED, EQUAL) if fate in fates)


def _fate_on(program: Program, inputs: Sequence[Tensor]) -> str:
    exits = program.exits(inputs)
    if exits is None:
        return REFUSED
    try:
        truth = program.on_one_device(inputs, exits)
        return EQUAL if same(program.on_ranks(inputs, exits), truth) else MISSED
    except ShardMapError:  # a collective refuses at run time
        return REFUSED


def same(first: Sequence[Tensor], second: Sequence[Tensor]) -> bool:
    """Equal up to what a few dozen float64 operations on such numbers cost."""
    return all(
        x.shape == y.shape
        and torch.allclose(x, y, rtol=1e-8, atol=1e-8 * max(1.0, float(y.abs().max())))
        for x, y in zip(first, second, strict=True)
    )


def scored(seeds: Sequence[int]) -> Score:
    """Grows one program a seed, and changes each of its collectives."""
    score = Score()
    for seed in seeds:
        inputs = drawn_inputs(seed)
        program, refused = grown(seed, inputs)
        score.programs += 1
        score.steps += len(program.steps)
        score.collectives += sum(step.name in CALLS for step in program.steps)
        score.refused += refused
        if _fate_on(program, inputs) != EQUAL:
            score.wrong.append(f"seed {seed}: {program}")
        for what, mutant in mutants(program, random.Random(seed)):
            fate = fate_of(mutant, inputs)
            score.note(what, fate)
            if fate == MISSED:
                score.wrong.append(f"seed {seed}, {what}: {mutant}\nof {program}")
    return score


def section(score: Score) -> str:
    """Writes the section on random programs under global strictness of the page on coverage."""
    total: Counter[str] = sum(score.fates.values(), Counter())
    rows = [
        (what, *map(fates.__getitem__, ENDS))
        for what, fates in [*sorted(score.fates.items()), ("all", total)]
    ]
    text = (
        f"{score.programs} programs of {score.steps} steps, {score.collectives} of them "
        f"collectives, were grown on meshes of two axes; {score.refused} steps that were drawn "
        "were refused. All values, and the gradients of a sum of all values, on rank threads "
        "in float64, were compared with the program without its collectives in plain PyTorch: "
        f"{len(score.wrong)} of the programs and their mutants were accepted and had others."
    )
    mutants = (
        "Mutants have one collective changed; on one device they are the same program. "
        "*equal*: accepted, and the values and gradients of one device on the program's own "
        "mesh and on axes of 2, 3 and 4 ranks. *missed*: accepted, and others."
    )
    title = 'Random programs under check="global"'
    table = page.table(("changed", *ENDS), rows)
    return page.section(title, "global_score", text, mutants, table)


def main() -> int:
    """Writes the page's section; a number on the command line says how many programs are grown."""
    score = scored(range(page.begin(PROGRAMS)))
    return page.finish(section(score), score.wrong)


if __name__ == "__main__":
    sys.exit(main())

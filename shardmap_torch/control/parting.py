"""Finds the first steps that ranks have not in common, by the lines of the user's code.

A rank that evaluates alone runs what the others run in their next step, and the comparison that
differs may come later. The lines of the last ones tell where the ranks parted.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher
from typing import Final, TypeAlias

from shardmap_torch.control.board import Step

Line: TypeAlias = tuple[str, ...]

_ALONE: Final = (
    "Fix: all ranks must come to it, in the same order, as each has a part of it: take it out of "
    "`if mesh.rank == 0:`, which is for what is done with its result, as to print it."
)
_SAME: Final = (
    "Fix: all ranks must come to the same, in the same order: with nothing of it under `if "
    "mesh.rank == 0:`, and with as many turns of a loop: a `break` after the smallest number of "
    "batches that a rank has, or by what is equal on all ranks, as full(loss); or rows by "
    "DistributedSampler, which pads."
)
BY: Final = " by "
"""Stands in a step of an optimizer before its numbers."""

_NUMBERS: Final = (
    "Fix: what decides a number of an optimizer must be equal on all ranks: give a scheduler the "
    "metric of all rows, as loss.item() of the parallelized module's loss, or full(metric), not "
    "one of this rank's own rows, nor mesh.rank."
)


def fix_of(steps: Sequence[Step]) -> str:
    """Says what to do about the last of one rank's steps, which another rank leaves out."""
    *before, last = [step.lines for step in steps]
    # A function that ranks have in common is told by the line that calls it.
    known = next((n for n in range(len(last), 1, -1) if last[:n] in [b[:n] for b in before]), 0)
    called = f"  called at {last[known]}\n" if 1 < known < len(last) else ""
    return _SAME if last in before else f"{called}{_ALONE}"


@dataclass(frozen=True)
class Parting:
    """The steps at which ranks part.

    Attributes:
        steps: that of each rank; None where it comes to no other.
        alone: the ranks whose step the others leave out; empty where each has another.
        fix: what to do.
    """

    steps: Mapping[int, Step | None]
    alone: Sequence[int]
    fix: str

    @property
    def are_others(self) -> bool:
        """True where the ranks do something else, and not the same on different lines."""
        return bool(self.alone) or len({step and step.what for step in self.steps.values()}) > 1

    def texts(self) -> dict[int, str]:
        """Returns the line of each rank."""
        lines = {r: step.lines if step else () for r, step in self.steps.items()}
        # Those of callers up to the first that tells the steps apart.
        most = next((n for n in range(2, 8) if len({each[:n] for each in lines.values()}) > 1), 2)
        return {r: _text(*each[:most]) if each else "no more" for r, each in lines.items()}


def _text(what: str, *lines: str) -> str:
    return f"{what} at " + ", called at ".join(lines)


def find_parting(trails: Mapping[int, Sequence[Step]]) -> Parting | None:
    """Finds where the first rank and another one part; None if they do not."""
    start = max([trail[0].check for trail in trails.values() if trail], default=0)
    since = {r: [s for s in trails[r] if s.check >= start] for r in sorted(trails)}
    lines = {r: [s.lines for s in steps] for r, steps in since.items()}
    mine = lines[min(lines)]
    theirs = next((each for each in lines.values() if each != mine), mine)
    found = _first_difference(mine, theirs)
    if found is None:
        return None
    i, j, how = found
    at = {r: i if each == mine else j for r, each in lines.items() if each in (mine, theirs)}
    steps = {r: since[r][n] if n < len(since[r]) else None for r, n in at.items()}
    left_out = {"delete": theirs, "insert": mine}.get(how)
    alone = [r for r in steps if left_out is not None and lines[r] != left_out]
    again = any(lines[r][at[r]] in lines[r][: at[r]] for r in alone)
    whats = {step.what if step else "" for step in steps.values()}
    if len({what.partition(BY)[0] for what in whats}) == 1 < len(whats):
        return Parting(steps, alone, _NUMBERS)
    return Parting(steps, alone, _ALONE if alone and not again else _SAME)


def _first_difference(mine: Sequence[Line], theirs: Sequence[Line]) -> tuple[int, int, str] | None:
    """Returns the places of the first lines that differ, and how; None if none does.

    A line in place of another is no difference where more follows, if what it does has the same
    name: a branch may do on either side what the ranks have in common.
    """
    for how, i, k, j, m in SequenceMatcher(None, mine, theirs, autojunk=False).get_opcodes():
        if k - i != m - j:
            return i, j, how
        last = (k, m) == (len(mine), len(theirs))
        for at, other_at in zip(range(i, k), range(j, m), strict=True):
            if mine[at][0] != theirs[other_at][0] or (last and how == "replace" and at == k - 1):
                return at, other_at, how
    return None

"""The steps with which runs are compared, as a list whose rows name the rows that follow them."""

from collections.abc import Sequence

import torch

from shardmap_torch.checker.guards.replay import Step
from shardmap_torch.checker.ir.outcomes import Crossing
from shardmap_torch.checker.stored.encoding import Json, decode, encode
from shardmap_torch.collectives.protocol import Note


def write_steps(start: Step) -> Json:
    """Writes a tree of steps; a loop, since it is as deep as the program is long.

    Raises:
        EncodingError: a step is of an operation that only this process has.
    """
    steps, rows = [start], []
    for step in steps:  # which grows
        following = range(len(steps), len(steps) + len(step.next))
        steps += step.next
        later = []
        for key, first in step.later.items():
            later.append([encode(key), len(steps)])
            steps.append(first)
        rows.append(
            [
                *map(encode, (step.what, step.shape, step.dtype)),
                *map(encode, (step.depth, step.types, step.note.value, step.note.types)),
                *map(encode, (step.site, step.last)),
                [[encode(where), encode(casts)] for where, casts in step.crossing.casts.items()],
                [*following],
                later,
            ]
        )
    return rows


def read_steps(rows: Json) -> Step:
    """Reads what `write_steps` wrote."""
    steps = [_read_step(row) for row in rows]
    for at, (step, (*_, following, later)) in enumerate(zip(steps, rows, strict=True)):
        step.next = [steps[_below(at, place)] for place in following]
        step.later = {decode(key): steps[_below(at, place)] for key, place in later}
    return steps[0]


def _below(at: int, place: int) -> int:
    if place <= at:  # rows that follow one another in a circle would never end
        raise ValueError("the order of steps")
    return place


def _read_step(row: Sequence[Json]) -> Step:
    what, shape, dtype, depth, types, value, note_types, site, last = map(decode, row[:9])
    step = Step(what, shape, dtype, int(depth), types, Note(value, note_types), site, last=last)
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ValueError("the dtype of a step")
    step.crossing = Crossing({decode(where): decode(casts) for where, casts in row[9]})
    return step

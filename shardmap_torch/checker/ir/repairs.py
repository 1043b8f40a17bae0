"""Repairs of a rejected program: proposed where it fails, and tried before they are printed."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import ShardTypeError

Place = tuple[Site | None, int]
"""A line of the user's, and how often it was passed before; the same on all ways through a body."""


class Places:
    """Counts how often each line is passed."""

    def __init__(self) -> None:
        """Nothing was passed yet."""
        self._counts: Counter[Site | None] = Counter()

    def next(self, site: Site | None) -> Place:
        """The place of what happens on this line now."""
        self._counts[site] += 1
        return site, self._counts[site] - 1


@dataclass(frozen=True)
class Repair:
    """A small change of a program.

    Attributes:
        text: what to write.
        collectives: by the place of the collective in the forward, another one in its stead, or
            None to leave it out.
        replicate: by the position of an input, an axis to name in its `replicate=`.
        exits: by the position of a result, axes over which to sum it before it leaves.
        values: places where to reduce a tensor before its Python value is taken.
        gradients: by the place where the body takes gradients, axes over which to sum them.
    """

    text: str
    collectives: Mapping[Place, Collective | None] = field(default_factory=dict)
    replicate: Mapping[int, str] = field(default_factory=dict)
    exits: Mapping[int, Sequence[str]] = field(default_factory=dict)
    values: frozenset[Place] = frozenset()
    gradients: Mapping[Place, Sequence[str]] = field(default_factory=dict)


def both(first: Repair, second: Repair) -> Repair:
    """Two changes at once.

    Example:
        >>> both(Repair("a", replicate={0: "tp"}), Repair("b", replicate={1: "tp"})).text
        'a, and b'
    """
    places = dict.fromkeys([*first.gradients, *second.gradients])
    return Repair(
        f"{first.text}, and {second.text}",
        {**first.collectives, **second.collectives},
        {**first.replicate, **second.replicate},
        {**first.exits, **second.exits},
        first.values | second.values,
        {p: (*first.gradients.get(p, ()), *second.gradients.get(p, ())) for p in places},
    )


NONE = Repair("")
"""The program as it is."""


def propose(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """Notes on an error what could be tried."""
    error.__dict__["_shardmap_repairs"] = tuple(repairs)
    return error


def proposed(error: ShardTypeError) -> tuple[Repair, ...]:
    """Returns the repair noted on an error."""
    found: tuple[Repair, ...] = error.__dict__.get("_shardmap_repairs", ())
    return found


def with_tried(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """The error with the repairs that passed, in the order in which they were proposed."""
    if repairs:
        lines = [f"Tried, and accepted also by check='global': {each.text}" for each in repairs]
        error.args = ("\n".join([str(error), *lines]),)
    error.__dict__["_shardmap_tried"] = tuple(repairs)
    return error


def tried(error: ShardTypeError) -> tuple[Repair, ...]:
    """The repairs that the message of an error names."""
    found: tuple[Repair, ...] = error.__dict__.get("_shardmap_tried", ())
    return found


_LINES: Final = 40
"""Maximal number of lines of a message; `findings` has all of it."""


def shortened(error: ShardTypeError) -> ShardTypeError:
    """The error with a message of at most 40 lines, and all that was found in `findings`."""
    lines = str(error).splitlines()
    error.findings = error.findings or (str(error),)
    if len(lines) > _LINES:
        left = len(lines) - _LINES + 1
        error.args = ("\n".join([*lines[: _LINES - 1], f"... and {left} more lines"]),)
    return error

"""Repairs of a rejected program: proposed where it fails, and tried before they are printed."""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final, Literal

from shardmap_torch.collectives.operations import Collective
from shardmap_torch.collectives.table import TABLE
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType, I, K, Partial, R, V

Op = Literal["sum", "mean"]
Place = tuple[Site | None, int]
"""A user's line, and how often it has run before; the same on all paths through a body."""


class Places:
    """Counts how often each line runs."""

    def __init__(self) -> None:
        """Starts at zero for each line."""
        self._counts: Counter[Site | None] = Counter()

    def next(self, site: Site | None) -> Place:
        """Returns the place of the current run of this line."""
        self._counts[site] += 1
        return site, self._counts[site] - 1


@dataclass(frozen=True)
class Repair:
    """A small change of a program.

    Attributes:
        text: what to write.
        collectives: for the place of a collective in the forward, its replacement, or None to
            leave it out.
        replicate: for the position of an input, an axis to name in its `replicate=`.
        exits: for the position of a result, axes over which to sum it before it is returned.
        values: places at which to reduce a tensor before its Python value is taken.
        gradients: for the place where the body takes gradients, the axes over which to reduce them,
            each with "sum" or "mean".
    """

    text: str
    collectives: Mapping[Place, Collective | None] = field(default_factory=dict)
    replicate: Mapping[int, str] = field(default_factory=dict)
    exits: Mapping[int, Sequence[str]] = field(default_factory=dict)
    values: frozenset[Place] = frozenset()
    gradients: Mapping[Place, Sequence[tuple[str, Op]]] = field(default_factory=dict)


def both(first: Repair, second: Repair) -> Repair:
    """Combines two repairs into one.

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
"""A repair that changes nothing."""


def axes(collective: Collective) -> str:
    """Formats the axes as the user wrote them."""
    return repr(collective.axes[0] if len(collective.axes) == 1 else collective.axes)


def instead(
    collective: Collective, place: Place, at: str, axis: str, have: AxisType
) -> Iterator[Repair]:
    """Yields repairs that take a collective out, or put one there that takes such an operand."""
    name = collective.name
    if have in (I, R, K):
        yield Repair(f"leave out {name}{at}", collectives={place: None})
    others = tuple(each for each in collective.axes if each != axis)
    if others:
        left = replace(collective, axes=others)
        yield Repair(f"leave {axis!r} out of {name}{at}", collectives={place: left})
    if (name, have, collective.dst) in TABLE:
        other = replace(collective, src=have)
        yield Repair(f"src={have} in {name}{at}", collectives={place: other})
    if name == "convert" and have in (V, Partial) and collective.dst in (I, R):
        total = Collective("all_reduce", Partial, collective.dst, collective.axes)
        text = f"all_reduce over {axes(collective)} with dst={collective.dst} in place of {name}"
        yield Repair(f"{text}{at}", collectives={place: total})


def propose(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """Attaches to an error the repairs that could be tried."""
    error.__dict__["_shardmap_repairs"] = tuple(repairs)
    return error


def proposed(error: ShardTypeError) -> tuple[Repair, ...]:
    """Returns the repairs attached to an error."""
    repairs: tuple[Repair, ...] = error.__dict__.get("_shardmap_repairs", ())
    return repairs


def with_tried(error: ShardTypeError, repairs: Sequence[Repair]) -> ShardTypeError:
    """Adds to an error the repairs that passed, in the order in which they were proposed."""
    if repairs:
        lines = [f"Tried, and accepted also by check='global': {each.text}" for each in repairs]
        error.args = ("\n".join([str(error), *lines]),)
    error.__dict__["_shardmap_tried"] = tuple(repairs)
    return error


def tried(error: ShardTypeError) -> tuple[Repair, ...]:
    """Returns the repairs that the message of an error names."""
    repairs: tuple[Repair, ...] = error.__dict__.get("_shardmap_tried", ())
    return repairs


_LINES: Final = 40
"""Maximal number of lines of a message; `findings` has all of it."""


def shortened(error: ShardTypeError) -> ShardTypeError:
    """Cuts an error's message to 40 lines; `findings` keeps the complete text."""
    lines = str(error).splitlines()
    error.findings = error.findings or (str(error),)
    if len(lines) > _LINES:
        left = len(lines) - _LINES + 1
        error.args = ("\n".join([*lines[: _LINES - 1], f"... and {left} more lines"]),)
    return error

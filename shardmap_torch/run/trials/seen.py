"""Seen: which conditions of a program random numbers have met, and how ranks differed in them."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.core.source_location import Site

Condition = tuple[Site | None, str, int, int]
"""The line of a condition, its operator, which of its conditions, and how many came before."""

TIES: Final = "equal entries in"
"""Beginning of the names of conditions on ties."""

Pattern = tuple[int, bool]
"""A rank, or -1 for all, and the value that it has; one rank where another one has the other."""


@dataclass
class Seen:
    """The conditions that were true somewhere, and those that were false somewhere.

    Attributes:
        true: those that were true.
        false: those that were false.
        patterns: of what ranks make of many entries, in which ways it was distributed over them.
        apart: of those of numbers, in which parts of dims ranks have other numbers (`_by_part`).
        mixed: in which parts they were true on a rank and false on another, of the same entry.
    """

    true: set[Condition] = field(default_factory=set)
    false: set[Condition] = field(default_factory=set)
    patterns: dict[Condition, set[Pattern]] = field(default_factory=dict)
    apart: dict[Condition, Tensor] = field(default_factory=dict)
    mixed: dict[Condition, Tensor] = field(default_factory=dict)

    def add(self, other: "Seen") -> None:
        """Adds what another run has met."""
        self.true |= other.true
        self.false |= other.false
        for mine, others in ((self.apart, other.apart), (self.mixed, other.mixed)):
            for condition, parts in others.items():
                known = mine.get(condition, parts)
                mine[condition] = known | parts if known.shape == parts.shape else parts
        for condition, patterns in other.patterns.items():
            self.patterns.setdefault(condition, set()).update(patterns)

    def unmixed(self, ranks: int) -> str | None:
        """Describes a summary of entries that ranks did not have in all ways; None if none is.

        Summaries that all ranks have alike are met as conditions are.
        """
        wanted = set(product(range(-1, ranks), (True, False)))
        for (site, name, _, _), met in sorted(self.patterns.items(), key=str):
            if any(rank >= 0 for rank, _ in met) and not wanted <= met:
                rank, value = min(wanted - met)
                where = "all ranks" if rank < 0 else f"rank {rank} and not on all"
                shown = str(value).lower()
                return f"{name} is never {shown} on {where} for random inputs, at {site}"
        for condition in sorted(self.apart, key=str):
            site, name, _, _ = condition
            same = self.apart[condition] & ~self.mixed[condition]
            if bool(same.any()):
                where = "" if bool(same.all()) else " in a part of its entries"
                return (
                    f"the condition of {name} is the same on all ranks{where} for random inputs, "
                    f"at {site}"
                )
        return None

    @property
    def ties(self) -> "Seen":
        """The conditions on equal entries alone, which move results by no more than their order."""
        return Seen(set(filter(_is_tie, self.true)), set(filter(_is_tie, self.false)))

    @property
    def has_ties(self) -> bool:
        """True if entries have been an extremum together, in some parts more often."""
        return any(map(_is_tie, self.true))

    @property
    def lacks_ties(self) -> bool:
        """True if entries that may be an extremum together have not been."""
        return any(map(_is_tie, self.false - self.true))

    @property
    def one_sided(self) -> set[tuple[Site | None, str]]:
        """The lines and operators of conditions that were the same everywhere, or on all ranks."""
        apart = (met for met, parts in self.apart.items() if (parts & ~self.mixed[met]).any())
        return {met[:2] for met in (*(self.true ^ self.false), *apart)}

    def missing(self, excused: "Seen") -> str | None:
        """Describes a condition that was the same everywhere; None if there is none.

        Excused is what happens only for arguments with which the body fails on one device.
        """
        never_false = self.true - self.false - excused.false
        never_true = self.false - self.true - excused.true
        for value, same in (("false", never_false), ("true", never_true)):
            for site, name, _, _ in sorted(same, key=str):
                return f"the condition of {name} is never {value} for random inputs, at {site}"
        return None


def _is_tie(met: Condition) -> bool:
    return met[1].startswith(TIES)


def patterns_of(by_rank: Mapping[int, Tensor]) -> Iterator[Pattern]:
    """Yields the ways in which a summary of many entries is distributed over the ranks."""
    shapes = {x.shape for x in by_rank.values()}
    if len(by_rank) < 2 or len(shapes) > 1:
        return
    made = torch.stack([*by_rank.values()])
    flags = made if made.dtype == torch.bool else made == made.amax(0)
    mixed = flags.any(0) & ~flags.all(0)
    for value in (True, False):
        if made.dtype != torch.bool or bool((flags == value).all(0).any()):
            yield -1, value
    for rank, own in zip(by_rank, flags, strict=True):
        for value in (True, False):
            if bool(((own == value) & mixed).any()):
                yield rank, value


def differences_of(
    pieces: Sequence[tuple[Tensor, Tensor]],
) -> tuple[Tensor, Tensor] | None:
    """Returns in which parts of a condition ranks have other numbers, and in which it is mixed.

    Args:
        pieces: of each rank where it is true (1) and false (-1), and what tells its numbers.
    """
    signs, numbers = zip(*pieces, strict=True)
    if len({x.shape for x in signs}) > 1:
        return None
    stacked, others = torch.stack(signs), torch.stack(numbers)
    several = by_part((stacked.count_nonzero(0) > 1).double()) > 0
    mixed = (stacked.amax(0) > 0).logical_and(stacked.amin(0) < 0)
    return several & (others != others[0]).any(0), by_part(mixed.double()) > 0


def told_by(numbers: Sequence[Tensor], shape: torch.Size) -> Tensor:
    """Returns for each part what changes with any entry, and where entries change places."""
    return torch.as_tensor(sum([by_part(_weighted(x, shape)) for x in numbers]))


def _weighted(x: Tensor, shape: torch.Size) -> Tensor:
    """Returns numbers whose sums change with any entry, and where entries change places.

    Those of an operand, for each entry of a condition; if it has another shape, their sum for all.
    """
    weights = torch.arange(x.numel(), dtype=torch.float64).cos().reshape(x.shape)
    found = x.nan_to_num(0.0, 0.0, 0.0) * weights
    try:
        return found.expand(shape)
    except RuntimeError:
        return found.sum().expand(shape)


_PARTS: Final = 32
"""Maximal number of parts of a dim: single entries of long ones would take more trials to mix."""


def by_part(x: Tensor) -> Tensor:
    """Sums over each of up to 32 parts of each dim, one dim after the other."""
    sums = []
    for dim, size in enumerate(x.shape):
        others = [other for other in range(x.ndim) if other != dim]
        each = x.sum(others) if others else x
        count = min(size, _PARTS)
        places = torch.arange(size) * count // max(size, 1)
        sums.append(each.new_zeros(count).index_add_(0, places, each))
    return torch.cat(sums) if sums else x.reshape(1)

"""Several grids on the same ranks: the finest axes from which those of all of them are made."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from shardmap_torch.errors import MeshError


@dataclass(frozen=True)
class Span:
    """An axis of one grid: ranks `stride` apart, `size` of them."""

    name: str
    stride: int
    size: int

    def contains(self, other: "Span") -> bool:
        """Returns whether another axis is a part of this one."""
        return (
            self.stride <= other.stride
            and other.stride * other.size <= self.stride * self.size
            and other.size < self.size
        )

    def __str__(self) -> str:
        """Formats it as `'tp' (2 ranks, 1 apart)`."""
        return f"{self.name!r} ({self.size} ranks, {self.stride} apart)"


Refined = tuple[dict[str, int], dict[str, tuple[str, ...]]]


def refined(grids: Sequence[Mapping[str, int]]) -> Refined:
    """Finds the axes from which those of several grids are made, each grid row-major.

    Returns:
        The finest axes with their sizes, major first. One that is an axis of a grid has its name,
        another those of the smallest axes that it is a part of. And, of each axis of a grid that is
        not among these, those of which it consists: none, if it has one rank.

    Raises:
        MeshError: one axis begins in the middle of another, or two of one name differ.

    Example:
        >>> refined([{"dp": 4, "cp": 2}, {"edp": 2, "ep": 4}])
        ({'edp': 2, 'dp&ep': 2, 'cp': 2}, {'dp': ('edp', 'dp&ep'), 'ep': ('dp&ep', 'cp')})
    """
    spans = _distinct([span for grid in grids for span in _spans(grid)])
    ends = sorted({end for span in spans for end in (span.stride, span.stride * span.size)})
    parts = {low: high // low for low, high in _nested(ends, spans)}
    names = {low: _name(low, size, spans) for low, size in parts.items()}
    axes = {names[low]: parts[low] for low in sorted(parts, reverse=True)}
    axes |= {name: 1 for name, size in grids[0].items() if size == 1}
    aliases = {
        span.name: tuple(
            names[low]
            for low in sorted(parts, reverse=True)
            if span.stride <= low < span.stride * span.size
        )
        for span in spans
        if span.name not in axes
    }
    return axes, aliases


def _spans(grid: Mapping[str, int]) -> Iterator[Span]:
    stride = 1
    for name, size in reversed(list(grid.items())):
        yield Span(name, stride, size)
        stride *= size


def _distinct(spans: Sequence[Span]) -> list[Span]:
    known: dict[str, Span] = {}
    for span in spans:
        other = known.setdefault(span.name, span)
        same = span == other or span.size == other.size == 1  # of one rank they are the same
        if not same:
            raise MeshError(f"Views of a mesh name two axes alike: {other} and {span}.")
    return list(known.values())


def _nested(ends: Sequence[int], spans: Sequence[Span]) -> Iterator[tuple[int, int]]:
    for low, high in pairwise(ends):
        if high % low:
            cut = [s for s in spans if {s.stride, s.stride * s.size} & {low, high} and s.size > 1]
            raise MeshError(
                "The axes of a mesh's views must be made of common parts: "
                f"{', '.join(map(str, cut))} are not, since blocks of {low} ranks do not divide "
                f"those of {high}."
            )
        yield low, high


def _name(low: int, size: int, spans: Sequence[Span]) -> str:
    for span in spans:
        if (span.stride, span.size) == (low, size):
            return span.name
    around = [s for s in spans if s.stride <= low < s.stride * s.size]
    innermost = [s for s in around if not any(s.contains(other) for other in around)]
    return "&".join(span.name for span in innermost)

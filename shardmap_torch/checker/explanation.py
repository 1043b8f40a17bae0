"""`Explanation`: the operations of a program line by line, as data, as text and as a page."""

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Final

from shardmap_torch.checker.ir.program import Equation, ProgramPath, show_types
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.contracts import call_given
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import ShardTypeError, SpecError
from shardmap_torch.mesh import Mesh
from shardmap_torch.report.page import Entry, Line, Page, Shown, Table, page_of_error
from shardmap_torch.report.units import show_bytes, show_seconds
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType

_FOLDED: Final = 3
"""Number of equal layers, one after another, from which they are shown once."""


@dataclass(frozen=True, eq=False, repr=False)
class Row:
    """One operation of a program, or several equal ones of layers that follow one another.

    Attributes:
        equation: the operation, with its literals; of several the first one.
        site: the user's line; in a backward that of the forward operation.
        operation: the name of the operation, with the types that a collective changes.
        is_backward: whether autograd derives it.
        operands: the dtypes and local shapes of the tensors that it reads, as `float32[4, 8]`.
        results: those of the tensors that it makes.
        types: the types of these, by axis.
        collective: the name of the collective or conversion; None for an operation on one rank.
        axes: the axes over which a collective goes.
        bytes_sent: the number of bytes that each rank sends, each time.
        backward: the collectives that autograd derives from this one.
        times: the number of equal layers, one after another, that have it.
        layer: the number of the operation with which the first of these layers begins.
        seconds: that it takes each time; None unless `Estimate.beside` has said it.
        allocated: the bytes of memory that it allocates each time; likewise.
    """

    equation: Equation
    site: Site | None
    operation: str
    is_backward: bool
    operands: tuple[str, ...]
    results: tuple[str, ...]
    types: tuple[Mapping[str, AxisType], ...]
    collective: str | None
    axes: tuple[str, ...]
    bytes_sent: int
    backward: "tuple[Row, ...]"
    times: int = 1
    layer: int = 0
    seconds: float | None = None
    allocated: int | None = None

    @property
    def transpose(self) -> Collective | None:
        """The backward in the table of the collective that this is the backward of, if any is.

        An extremum has none.
        """
        forward = self.equation.forward
        if forward is None or str(forward.collective) != forward.name:
            return None
        return None if forward.collective is None else forward.collective.transpose

    @property
    def is_specified(self) -> bool | None:
        """Returns whether a collective of a backward is that of the table; None if it has none."""
        return None if self.transpose is None else self.equation.collective == self.transpose

    @lazy
    def key(self) -> tuple[Any, ...]:
        """Everything that is the same in equal layers."""
        uses = self.equation.operands, self.equation.results
        shown = [(use.dtype, use.shape, use.types) for part in uses for use in part]
        below = tuple(row.key for row in self.backward)
        return self.operation, self.site, self.is_backward, tuple(shown), below

    def to_json(self) -> dict[str, Any]:
        """Returns the row as what JSON has."""
        file, line = (None, None) if self.site is None else (self.site.file, self.site.line)
        return {"file": file, "line": line} | {
            **{name: getattr(self, name) for name in _SHOWN},
            "types": [{axis: str(of) for axis, of in each.items()} for each in self.types],
            "backward": [row.to_json() for row in self.backward],
        }

    def __repr__(self) -> str:
        """Formats it as one line."""
        times = f", {self.times} times" if self.times > 1 else ""
        sent = f", sends {self.bytes_sent} B" if self.bytes_sent else ""
        return f"<{self.operation} -> {', '.join(self.results)}{sent}{times} at {self.site}>"


_SHOWN: Final = (
    *("operation", "operands", "results", "types", "collective", "axes", "bytes_sent"),
    *("is_backward", "backward", "times", "seconds", "allocated"),
)
"""Attributes of a row that JSON has, in order."""


def _row(equation: Equation, axis_names: tuple[str, ...], backward: tuple[Row, ...] = ()) -> Row:
    made, types = equation.collective, [use.types for use in equation.results]
    return Row(
        equation,
        equation.site,
        equation.name,
        equation.backward,
        operands=tuple(map(str, equation.operands)),
        results=tuple(map(str, equation.results)),
        types=tuple(dict(zip(axis_names, each, strict=True)) for each in types),
        collective=None if made is None else made.name,
        axes=() if made is None else made.axes,
        bytes_sent=equation.sent,
        backward=backward,
    )


def rows_of(path: ProgramPath, axis_names: tuple[str, ...]) -> tuple[Row, ...]:
    """Returns the operations of one path; equal layers that follow one another are one."""
    derived: dict[Equation, list[Row]] = {}
    for equation in path.equations:
        if equation.backward and equation.collective is not None and equation.forward is not None:
            derived.setdefault(equation.forward, []).append(_row(equation, axis_names))
    made = [_row(e, axis_names, tuple(derived.get(e, ()))) for e in path.equations]
    return tuple(_folded(made))


def _folded(rows: Sequence[Row]) -> Iterator[Row]:
    numbers: dict[tuple[Any, ...], int] = {}
    keys = [numbers.setdefault(row.key, len(numbers)) for row in rows]
    following = _next_equal(keys)
    at = 0
    while at < len(rows):
        length, covered = _repeated(keys, following, at)
        before = _before_first_line(rows[at : at + length], covered % length)
        yield from rows[at : at + before]
        at += before
        times = covered // length
        yield from (replace(row, times=times, layer=at) for row in rows[at : at + length])
        at += length * times


def _before_first_line(rows: Sequence[Row], most: int) -> int:
    """Returns after how many operations, at most so many, a layer begins: at its first line."""
    lines = [0 if row.site is None else row.site.line for row in rows]
    return min(range(most + 1), key=lambda at: (lines[at], lines[at - 1] == lines[at]))


def _next_equal(keys: Sequence[int]) -> list[int | None]:
    """Returns for each place the next one with the same key."""
    latest: dict[int, int] = {}
    found: list[int | None] = [None] * len(keys)
    for at in range(len(keys) - 1, -1, -1):
        found[at] = latest.get(keys[at])
        latest[keys[at]] = at
    return found


def _repeated(keys: Sequence[int], following: Sequence[int | None], at: int) -> tuple[int, int]:
    """Returns the length of a block from here on that repeats, and how many operations that is."""
    end = following[at]
    while end is not None:
        length, last = end - at, end
        while last < len(keys) and keys[last] == keys[last - length]:
            last += 1
        if last - at >= _FOLDED * length:
            return length, last - at
        end = following[end]
    return 1, 1


@dataclass(frozen=True)
class ExplainedPath:
    """One path through a body: what it does, and under which conditions.

    Attributes:
        title: the branches that it takes; empty if there is one path alone.
        rows: its operations, forward and backward.
        gradients: the types of the gradients of arguments in the body.
        end: the exception with which it ends; empty if it returns.
    """

    title: tuple[str, ...]
    rows: tuple[Row, ...]
    gradients: tuple[tuple[str, Mapping[str, AxisType]], ...]
    end: str


def explained(number: int, path: ProgramPath, axis_names: tuple[str, ...]) -> ExplainedPath:
    """Explains one path of a program; `number` distinguishes it from the others."""
    gradients = [(name, dict(zip(axis_names, of, strict=True))) for name, of in path.gradients]
    title = title_of(number, path, sites=True)
    return ExplainedPath(tuple(title), rows_of(path, axis_names), tuple(gradients), path.end)


def title_of(number: int, path: ProgramPath, sites: bool) -> Sequence[str]:
    """Formats the title as `path 1, where #1 > 1.0 is True`; nothing if there is one path."""
    branches = [
        f"{branch.condition} is {branch.holds}" + (f"  # {branch.site}" if sites else "")
        for branch in path.branches
    ]
    words = [f"path {number}, where", *["  and"] * len(branches)]
    return [f"{word} {branch}" for word, branch in zip(words, branches, strict=False)]


@dataclass(frozen=True, repr=False)
class Explanation(Shown):
    """A program: each operation with its line, types, bytes and backward, beside one device.

    `str` formats its collectives, in a notebook it is a page, and `html(path)` writes that.

    Attributes:
        name: the name of the function.
        mesh: the mesh that it was checked for.
        arguments: the path and the spec of each tensor argument, with every axis typed.
        paths: the paths through the body; several if it branches on numbers taken from tensors.
        bytes_sent: the bytes that each rank sends, by axis, forward and backward together.
        one_device: whether the ranks compute what one device does: "proven" by layouts, "tried"
            with numbers or "refused"; empty if that was not asked.
        assumed: what global strictness assumes to be right, such as a `local_region`.
        tried: how it was compared with one device by numbers; empty if layouts prove it.
        refusal: why it is another program than on one device; None if it is the same.
    """

    name: str
    mesh: Mesh
    arguments: tuple[tuple[str, P], ...]
    paths: tuple[ExplainedPath, ...]
    bytes_sent: Mapping[str, int]
    one_device: str = ""
    assumed: tuple[str, ...] = ()
    tried: str = ""
    refusal: ShardTypeError | None = None

    @property
    def rows(self) -> tuple[Row, ...]:
        """The operations of all paths, in the order of execution."""
        return tuple(row for path in self.paths for row in path.rows)

    @property
    def collectives(self) -> tuple[Row, ...]:
        """The rows that connect ranks, or convert types."""
        return tuple(row for row in self.rows if row.collective is not None)

    def with_rows(self, change: Callable[[Row], Row]) -> "Explanation":
        """Returns the explanation with other rows, backwards included."""

        def changed(rows: Sequence[Row]) -> tuple[Row, ...]:
            found = [replace(row, backward=changed(row.backward)) for row in rows]
            return tuple(call_given(change, (row,), {}, SpecError, "with_rows") for row in found)

        return replace(self, paths=tuple(replace(p, rows=changed(p.rows)) for p in self.paths))

    def to_json(self) -> dict[str, Any]:
        """Returns the explanation as what JSON has."""
        return {
            "name": self.name,
            "mesh": dict(self.mesh.shape),
            "arguments": {path: repr(spec) for path, spec in self.arguments},
            "paths": [
                {"where": path.title, "end": path.end, "rows": [r.to_json() for r in path.rows]}
                for path in self.paths
            ],
            "bytes_sent": dict(self.bytes_sent),
            "one_device": self.one_device,
            "assumed": self.assumed,
            "tried": self.tried,
            "refusal": None if self.refusal is None else str(self.refusal),
        }

    def __str__(self) -> str:
        """Formats the collectives with their lines, bytes and backwards, and the verdict."""
        lines = [f"{self.name} on the {self.mesh}", "arguments:"]
        specs = _alike([(path, repr(spec)) for path, spec in self.arguments])
        lines += [f"  {path}: {spec}" for path, spec in specs]
        for path in self.paths:
            lines += [*path.title, *_explained(path)]
        lines.append("bytes sent by each rank, forward and backward:")
        lines += [f"  {axis}: {count}" for axis, count in sorted(self.bytes_sent.items()) if count]
        return "\n".join([*lines, *self._globally()])

    __repr__ = __str__

    def _globally(self) -> list[str]:
        """Formats the verdict of global strictness."""
        if not self.one_device:
            return []
        if self.refusal is not None:
            return ["global: another program than on one device:", *f"{self.refusal}".splitlines()]
        promised = _PROMISED if self.assumed else ""
        tried = [f"  {line}" for line in self.tried.splitlines()]
        return [f"global: the same program on one device{promised}", *self.assumed, *tried]

    def page(self) -> Page:
        """Returns the page: the source, and beside each line what it makes."""
        sent = [(axis, f"{count:,}") for axis, count in sorted(self.bytes_sent.items())]
        specs = _alike([(path, repr(spec)) for path, spec in self.arguments])
        tables = [
            Table("Arguments", ["Argument", "Spec"], specs),
            Table("Bytes sent by each rank", ["Axis", "Bytes"], sent),
            *(table for path in self.paths for table in _gradients(path)),
        ]
        entries, verdict = _entries(self.rows), _VERDICTS[self.one_device]
        if self.assumed:
            verdict = verdict.removesuffix(".") + _PROMISED
        causes = {} if self.refusal is None else page_of_error(self.refusal).entries
        lines = sorted({*causes, *entries})
        return Page(
            f"{self.name} on the {self.mesh}",
            entries={at: [*causes.get(at, ()), *entries.get(at, ())] for at in lines},
            tables=tables,
            verdict=verdict,
            text="\n".join(self._globally()[1:]),
        )


_PROMISED: Final = ", if these keep what they promise:"
_VERDICTS: Final = {
    "": "",
    "proven": "The ranks compute what one device does: proven.",
    "tried": "The ranks compute what one device does: tried with random numbers.",
    "refused": "Another program than on one device.",
}


def _gradients(path: ExplainedPath) -> Iterator[Table]:
    if path.gradients:
        rows = _alike([(name, _shown(types)) for name, types in path.gradients])
        title = "; ".join(["Gradients of arguments in the body", *path.title])
        yield Table(title, ["Argument", "Types"], rows)


def _shown(types: Mapping[str, AxisType]) -> str:
    return show_types(tuple(types.values()), tuple(types))


def _entries(rows: Sequence[Row]) -> dict[Line, list[Entry]]:
    """Returns what is said of each line, equal operations once.

    The collectives of a backward stand below those of the forward, and the rest of it follows.
    """
    found: dict[Line, Counter[Entry]] = defaultdict(Counter)
    for row in sorted(rows, key=lambda row: row.is_backward):
        is_below = row.is_backward and row.collective is not None and row.equation.forward
        if row.site is not None and not is_below:
            found[row.site.file, row.site.line][_entry(row)] += row.times
    return {
        line: [replace(entry, times=times) for entry, times in entries.items()]
        for line, entries in sorted(found.items())
    }


def _entry(row: Row) -> Entry:
    kind = "value" if row.collective is None else "collective"
    kind = "backward" if row.is_backward else kind
    types = tuple((a, str(of)) for each in row.types[:1] for a, of in each.items())
    sent = f"sends {row.bytes_sent:,} B over {', '.join(row.axes)}" if row.bytes_sent else ""
    sent = ", ".join([sent] * bool(sent) + _costs(row))
    text = f"{row.operation} → {', '.join(row.results) or 'nothing'}"
    return Entry(text, kind, types, sent, below=tuple(map(_entry, row.backward)))


def _explained(path: ExplainedPath) -> Iterator[str]:
    """Formats the collectives of one path, each with its backward."""
    yield "collectives:"
    for (times, _), rows in groupby(path.rows, key=lambda row: (row.times, row.layer)):
        lines = [line for row in rows for line in _listed(row)]
        if times == 1:
            yield from lines
        elif lines:
            yield f"  {times} layers, each:"
            yield from (f"  {line}" for line in lines)
    derived = [row for row in path.rows if row.is_backward and row.collective is not None]
    boundary = [row for row in derived if not _of_collective(row.equation.forward)]
    yield from ["gradients of arguments:"] if boundary or path.gradients else []
    gradients = _alike([(name, _shown(types)) for name, types in path.gradients])
    yield from (f"  {name}: {types}" for name, types in gradients)
    yield from map(_line, boundary)
    yield from [f"  {path.end}"] if path.end else []


def _of_collective(forward: Equation | None) -> bool:
    return forward is not None and forward.collective is not None


def _listed(row: Row) -> Iterator[str]:
    """Formats a collective of the forward, with its backward."""
    if row.collective is not None and not row.is_backward:
        yield _line(row)
        for back in row.backward:
            yield f"    backward: {_line(back).strip()}{_specified(back)}"


def _specified(row: Row) -> str:
    """Formats whether a backward collective is the transpose in the table."""
    if row.is_specified is None:
        return ""
    return ", as specified" if row.is_specified else f", specified: {row.transpose}"


def _line(row: Row) -> str:
    times = f", {row.times} times" if row.times > 1 and row.is_backward else ""
    site = f"  # {row.site}" if row.site is not None and not row.is_backward else ""
    costs = "".join(f", {each}" for each in _costs(row))
    return f"  {row.operation} of {row.operands[0]}, sends {row.bytes_sent} B{costs}{times}{site}"


def _costs(row: Row) -> list[str]:
    """Formats the estimates of a row, if it has any."""
    words = [] if row.seconds is None else [f"takes {show_seconds(row.seconds)}"]
    return words + ([f"allocates {show_bytes(row.allocated)}"] if row.allocated else [])


def _alike(pairs: Sequence[tuple[str, str]]) -> list[tuple[str, str]]:
    """Joins the names of equal layers, which differ in numbers, if the same is said of them."""
    groups: dict[tuple[str, str], list[str]] = {}
    for name, text in pairs:
        groups.setdefault((re.sub(r"\d+", "#", name), text), []).append(name)
    return [
        (name, text)
        for (_, text), names in groups.items()
        for name in (names if len(names) < _FOLDED else [_range(names)])
    ]


def _range(names: Sequence[str]) -> str:
    return f"{names[0]} to {names[-1]}, {len(names)} alike"

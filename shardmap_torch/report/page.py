"""`Page`: the user's source on the left, and beside each line what it makes; rendered as HTML.

It knows lines and texts alone: programs and pictures of shards are made of these. An error's page
has the refused line and its causes, which its text names, beside their source.
"""

import linecache
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from itertools import count, zip_longest
from pathlib import Path
from traceback import walk_tb
from typing import Final

from shardmap_torch.report.style import LEGEND, STYLE

Line = tuple[str, int]
"""A file, and the number of a line in it."""

_CONTEXT: Final = 1
"""Number of lines that are shown before and after those about which there is something to say."""

_NUMBERS: Final = count(1)
"""Distinguishes the pages of one notebook, whose links share its names."""


@dataclass(frozen=True)
class Entry:
    """A note on one line of the source.

    Attributes:
        text: an operation with its result, or a cause.
        kind: "value", "collective", "refused" or "cause", which decides the mark.
        types: axes of the mesh and types of the value that it makes.
        more: what follows, as the bytes that it sends.
        times: the number of equal ones, one after the other.
        below: those that belong to it, as the collectives of its backward.
    """

    text: str
    kind: str = "value"
    types: tuple[tuple[str, str], ...] = ()
    more: str = ""
    times: int = 1
    below: "tuple[Entry, ...]" = ()


@dataclass(frozen=True)
class Table:
    """A table below the source.

    Attributes:
        title: its caption.
        head: the names of its columns.
        rows: their texts, of which the first one names the row.
        colors: numbers of colours of the other cells; none by default.
    """

    title: str
    head: Sequence[str]
    rows: Sequence[Sequence[str]]
    colors: Sequence[Sequence[int | None]] = ()


@dataclass(frozen=True)
class Page:
    """A page about one program.

    Attributes:
        title: its headline.
        verdict: one sentence below it.
        entries: what is said about each line.
        tables: what belongs to no line.
        text: a longer text, as of an error.
        figures: pictures, as SVG.
    """

    title: str
    verdict: str = ""
    entries: Mapping[Line, Sequence[Entry]] = field(default_factory=dict)
    tables: Sequence[Table] = ()
    text: str = ""
    figures: Sequence[str] = ()

    def fragment(self) -> str:
        """Returns the page as a part of another one, as a notebook has it."""
        key = f"smt{next(_NUMBERS)}"
        parts = [f"<h2>{escape(self.title)}</h2>"]
        if self.verdict:
            parts.append(f"<p><strong>{escape(self.verdict)}</strong></p>")
        parts += self._jumps(key)
        if self.text:
            parts.append(f"<pre tabindex='0'>{self._linked(key)}</pre>")
        parts += [f"<figure tabindex='0'>{figure}</figure>" for figure in self.figures]
        files = dict.fromkeys(file for file, _ in sorted(self.entries))
        for at, file in enumerate(files):
            parts += self._source(f"{key}-{at}", file)
        parts += [part for table in self.tables for part in _table(table)]
        if any(entry.types for entries in self.entries.values() for entry in entries):
            parts.append(LEGEND)
        body = "\n".join(parts)
        return f"<article class='smt' lang='en'>\n<style>{STYLE}</style>\n{body}\n</article>"

    def document(self) -> str:
        """Returns the page as a document of its own, which needs no other file."""
        return (
            "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
            "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
            "<meta name='color-scheme' content='light dark'>\n"
            f"<title>{escape(self.title)}</title>\n</head>\n"
            f"<body class='smt-page'>\n<main>\n{self.fragment()}\n</main>\n</body>\n</html>\n"
        )

    def _source(self, key: str, file: str) -> Iterator[str]:
        lines, source = (
            sorted(at for name, at in self.entries if name == file),
            linecache.getlines(file),
        )
        yield (
            f"<div class='scroll' tabindex='0' role='region' aria-label='{escape(file)}'>"
            f"<table><caption>{escape(Path(file).name)}</caption>"
            "<thead><tr><th scope='col'>Line</th><th scope='col'>Source</th>"
            "<th scope='col' class='notes'>What it makes</th></tr></thead><tbody>"
        )
        before, shown = None, _with_context(lines, source)
        indent = _indent([source[at - 1] for at in shown if at <= len(source)])
        for at in shown:
            if before is not None and any(map(str.strip, source[before : at - 1])):
                yield "<tr class='gap'><td colspan='3'>⋯</td></tr>"
            before, text = at, source[at - 1][indent:].rstrip() if at <= len(source) else ""
            entries = self.entries.get((file, at), ())
            marks = " ".join(sorted({entry.kind for entry in entries} & {"refused", "cause"}))
            notes = f"<ul>{''.join(map(_entry, entries))}</ul>" if entries else ""
            yield (
                f"<tr id='{key}-{at}' class='{marks}'><th scope='row'>"
                f"<a href='#{key}-{at}'>{at}</a></th>"
                f"<td><code>{escape(text)}</code></td><td class='notes'>{notes}</td></tr>"
            )
        yield "</tbody></table></div>"

    def _links(self, key: str) -> Mapping[Line, str]:
        """Returns the names of the lines, for links to them."""
        files = list(dict.fromkeys(file for file, _ in sorted(self.entries)))
        return {line: f"#{key}-{files.index(line[0])}-{line[1]}" for line in self.entries}

    def _jumps(self, key: str) -> Iterator[str]:
        """Links to the lines that are refused, and to their causes."""
        links = self._links(key)
        found = [
            f"<li><a href='{links[line]}'>{words}: {escape(Path(line[0]).name)}:{line[1]}</a></li>"
            for kind, words in (("refused", "The refused line"), ("cause", "A cause"))
            for line, entries in self.entries.items()
            if any(entry.kind == kind for entry in entries)
        ]
        if found:
            yield f"<nav aria-label='Lines'><ul>{''.join(found)}</ul></nav>"

    def _linked(self, key: str) -> str:
        """Returns the text, in which each line of the source is a link."""
        text = escape(self.text)
        for (file, at), link in sorted(self._links(key).items(), key=lambda each: -each[0][1]):
            place = escape(f"{Path(file).name}:{at}")
            text = text.replace(f"{place}:", f"<a href='{link}'>{place}</a>:")
        return text


def _with_context(lines: Sequence[int], source: Sequence[str]) -> list[int]:
    """Adds the lines around these, but empty ones."""
    around = {at + more for at in lines for more in range(-_CONTEXT, _CONTEXT + 1)}
    filled = {at for at in around if 0 < at <= len(source) and source[at - 1].strip()}
    return sorted(filled | {*lines})


def _indent(lines: Sequence[str]) -> int:
    """Returns the number of characters by which all of these lines are indented."""
    return min((len(line) - len(line.lstrip()) for line in lines if line.strip()), default=0)


_MARKS: Final = {
    "value": "",
    "collective": "⇄ ",
    "backward": "← backward: ",
    "refused": "✗ refused: ",
    "cause": "↑ cause: ",
}


def _entry(entry: Entry) -> str:
    """Renders one entry; words and marks say what colours say."""
    badges = "".join(
        f" <span class='type {kind[:1]}'>{escape(axis)}: {escape(kind)}</span>"
        for axis, kind in entry.types
    )
    more = f" <span class='more'>{escape(entry.more)}</span>" if entry.more else ""
    times = f" <span class='more'>{entry.times} times</span>" if entry.times > 1 else ""
    below = f"<ul>{''.join(map(_entry, entry.below))}</ul>" if entry.below else ""
    text = f"{_MARKS[entry.kind]}{escape(entry.text)}{badges}{more}{times}"
    return f"<li class='{entry.kind}'>{text}{below}</li>"


def _table(table: Table) -> Iterator[str]:
    head = "".join(f"<th scope='col'>{escape(name)}</th>" for name in table.head)
    yield (
        "<div class='scroll' tabindex='0' role='region' "
        f"aria-label='{escape(table.title)}'><table><caption>{escape(table.title)}</caption>"
        f"<thead><tr>{head}</tr></thead><tbody>"
    )
    every = table.colors or [()] * len(table.rows)
    for (first, *rest), colors in zip(table.rows, every, strict=True):
        cells = "".join(
            f"<td class='{'' if color is None else f'c{color}'}'>{escape(cell)}</td>"
            for cell, color in zip_longest(rest, colors)
        )
        yield f"<tr><th scope='row'>{escape(first)}</th>{cells}</tr>"
    yield "</tbody></table></div>"


class Shown:
    """Something that has a page: notebooks show it, and `html` writes it."""

    __slots__ = ()

    def page(self) -> Page:
        """Returns the page."""
        raise NotImplementedError

    def _repr_html_(self) -> str:
        return self.page().fragment()

    def html(self, path: str | Path) -> Path:
        """Writes the page to a file, which needs no other one; returns its path."""
        written = Path(path)
        written.write_text(self.page().document(), encoding="utf-8")
        return written


_PLACE: Final = re.compile(r"(?P<file>[^\s/\\:]+):(?P<line>\d+): (?P<source>.+)")
"""A line of the user's code as errors name it: `model.py:12: y = x @ w`."""

_REFUSED: Final = ("  at ", "  in the backward of ", "  in the backward at ", "  called at ")
"""Beginnings of the lines of a message that name where it was found."""


def page_of_error(error: BaseException) -> Page:
    """Returns the page of an error, whose text names lines of the user's code."""
    text = str(error)
    entries: dict[Line, list[Entry]] = {}
    files = _files(error)
    for row in text.splitlines():
        for line, before in _places(row, files):
            kind = "refused" if row.startswith(_REFUSED) else "cause"
            said = entries.setdefault(line, [])
            what = text.partition("\n")[0] if kind == "refused" else before
            if all(entry.text != what for entry in said):
                said.append(Entry(what, kind))
    return Page(type(error).__name__, "", entries, (), text)


def _places(row: str, files: Sequence[str]) -> Iterator[tuple[Line, str]]:
    """Yields the lines of the source that a line of a message names, and what it says of each."""
    for words in row.split(" <- "):
        found = _PLACE.search(words)
        file = None if found is None else _file_of(found, files)
        if found is not None and file is not None:
            before = words[: found.start()].strip().removesuffix(" at")
            yield (file, int(found["line"])), before


def _file_of(found: re.Match[str], files: Sequence[str]) -> str | None:
    """Returns the file of that name which has that source on that line."""
    for file in files:
        source = linecache.getline(file, int(found["line"])).strip()
        if Path(file).name == found["file"] and source and found["source"].startswith(source):
            return file
    return None


def _files(error: BaseException) -> list[str]:
    """Returns the files of the frames of an error, and all whose lines a message has been given."""
    frames = [frame.f_code.co_filename for frame, _ in walk_tb(error.__traceback__)]
    return list(dict.fromkeys([*reversed(frames), *linecache.cache]))

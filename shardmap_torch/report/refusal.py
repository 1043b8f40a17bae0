"""The page of an error: its text, the refused line and its causes beside their source."""

import linecache
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from traceback import walk_tb
from typing import Final

from shardmap_torch.report.page import Entry, Line, Page

_PLACE: Final = re.compile(r"(?P<file>[^\s/\\:]+):(?P<line>\d+): (?P<source>.+)")
"""A line of the user's code as errors name it: `model.py:12: y = x @ w`."""

_REFUSED: Final = ("  at ", "  in the backward of ", "  called at ")
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

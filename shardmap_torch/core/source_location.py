"""Source locations in the user's code."""

import contextlib
import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Final

import optree
import torch
import typing_extensions

_HERE: Final = Path(__file__).resolve().parents[2]
_OWN: Final = (
    *(str(_HERE / name) + "/" for name in ("shardmap_torch", "ops", "kernels")),
    *(str(Path(package.__file__ or "").parent) + "/" for package in (torch, optree)),
    contextlib.__file__,
    typing_extensions.__file__,  # what torch deprecates is called through it
    "<",
)

_USERS: Final[dict[str, bool]] = {}
"""Tells by a file's name if it is the user's: each operation of a check asks for all frames."""


@dataclass(frozen=True)
class Site:
    """A line of the user's code.

    Attributes:
        file: path of the file.
        line: number of the line.
    """

    file: str
    line: int

    @property
    def source(self) -> str:
        """The text of the line."""
        return linecache.getline(self.file, self.line).strip()

    @property
    def place(self) -> str:
        """Formats it as `model.py:12`."""
        return f"{Path(self.file).name}:{self.line}"

    def __str__(self) -> str:
        """Formats it as `model.py:12: y = x @ w`."""
        source = self.source
        return self.place + (f": {source}" if source else "")


def error_site(error: BaseException) -> Site | None:
    """Finds the innermost line of the user's code in an exception's traceback."""
    lines = [Site(frame.f_code.co_filename, line) for frame, line in walk_tb(error.__traceback__)]
    return next((site for site in reversed(lines) if not site.file.startswith(_OWN)), None)


def call_site() -> Site | None:
    """Finds the innermost line on the stack that is neither in this package nor in torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        is_users = _USERS.get(name)
        if is_users is None:
            is_users = _USERS[name] = not name.startswith(_OWN)
        if is_users:
            return Site(name, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None


def is_own(frame: FrameType) -> bool:
    """Returns whether a frame runs code of this package."""
    return frame.f_code.co_filename.startswith(_OWN[:3])

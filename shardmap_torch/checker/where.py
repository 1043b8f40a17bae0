"""Where in the user's code something happens."""

import linecache
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

_HERE: Final = Path(__file__).resolve().parents[2]
_OWN: Final = (
    *(str(_HERE / name) + "/" for name in ("shardmap_torch", "ops", "kernels")),
    str(Path(torch.__file__).parent) + "/",
    "<",
)


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

    def __str__(self) -> str:
        """As in `model.py:12: y = x @ w`."""
        source = self.source
        return f"{Path(self.file).name}:{self.line}" + (f": {source}" if source else "")


def call_site() -> Site | None:
    """The innermost line that belongs neither to this package nor to torch."""
    frame = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith(_OWN):
            return Site(name, frame.f_lineno)
        if frame.f_back is None:
            return None
        frame = frame.f_back
    return None

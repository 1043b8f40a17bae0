"""Whole texts that tests compare with, by the name of the test that raises them.

`SHARDMAP_GOLDEN=1 pytest FILES` writes them, with `SHARDMAP_FUZZ=1` those of all cases; read the
difference before you commit it.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final, TypeVar

import pytest

Error = TypeVar("Error", bound=BaseException)

FOLDER: Final = Path(__file__).parents[1] / "golden"
WRITES: Final = bool(os.environ.get("SHARDMAP_GOLDEN"))
_HEAD: Final = "=== "

Errors = type[BaseException] | tuple[type[BaseException], ...]


def read(path: Path) -> dict[str, str]:
    """The texts of one file."""
    parts = ("\n" + path.read_text() if path.exists() else "").split("\n" + _HEAD)[1:]
    return dict(part.rstrip("\n").split("\n", 1) for part in parts)


_VARYING: Final = {
    r"(\w+\.py):\d+": r"\1:LINE",
    r"/\S*/pytest-of-\w+/pytest-\d+/(?:popen-\w+/)?": "TMP/",
    r" at 0x[0-9a-f]+": "",
}
"""Line numbers, which every edit of a test changes, folders of tests, and addresses."""


def without_lines(text: str) -> str:
    """The text without what differs from run to run."""
    for pattern, instead in _VARYING.items():
        text = re.sub(pattern, instead, text)
    return text


def unplaced(error: BaseException) -> str:
    """The text without the line in which the body calls what it is about."""
    return re.sub(r"\n  at \S+:\d+: .*", "", f"{error}", count=1)


def hold(file: str, name: str, text: str) -> None:
    """Compares a text with the one that is kept under `name`, or keeps it."""
    path, text = FOLDER / file, without_lines(text)
    kept = read(path)
    if WRITES:
        kept[name] = text
        path.write_text("\n\n".join(f"{_HEAD}{k}\n{v}" for k, v in sorted(kept.items())) + "\n")
    assert kept.get(name) == text


def hold_own(text: str, part: int = 1) -> None:
    """Compares a text of the running test, its `part`-th, with the kept one.

    Those of one folder of tests are in one file, in `golden/texts`.
    """
    test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].removeprefix("tests/")
    folder = re.split(r"/|\.py", test)[0]
    hold(f"texts/{folder}.txt", test + (f" {part}" if part > 1 else ""), text)


@contextmanager
def told(
    kind: type[Error] | tuple[type[Error], ...], part: int = 1
) -> Iterator[pytest.ExceptionInfo[Error]]:
    """Expects an error whose whole text is that which is kept for the running test."""
    with pytest.raises(kind) as caught:
        yield caught
    hold_own(str(caught.value), part)

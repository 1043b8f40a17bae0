"""docs/coverage.md: each program of `make fuzz` writes its own section and leaves the others."""

import re
import subprocess
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "coverage.md"
GENERATED: Final = ("docs/coverage.md", "tests/checker/support/rows.json")


def replaced(page: str, section: str) -> str:
    """The page with a section, whose first line is its heading, in place of the one so called.

    Example:
        >>> replaced("# A\\n\\nold\\n\\n## B\\n\\nkept\\n", "# A\\n\\nnew\\n")
        '# A\\n\\nnew\\n\\n## B\\n\\nkept\\n'
    """
    parts = [part.strip() for part in re.split(r"^(?=##? )", page, flags=re.MULTILINE)]
    sections = {part.splitlines()[0]: part for part in parts if part}
    sections[section.strip().splitlines()[0]] = section.strip()
    return "\n\n".join(sections.values()) + "\n"


def write(section: str) -> None:
    """Puts a section into the page."""
    before = DOCUMENT.read_text() if DOCUMENT.exists() else ""
    DOCUMENT.write_text(replaced(before, section))


def commit() -> str:
    """The commit that is checked out, with its date, and whether files have been changed since."""
    head = _git("log", "-1", "--format=%h (%cs)").strip()
    changed = {line[3:] for line in _git("status", "--porcelain", "-uno").splitlines()}
    return f"{head}, with changes since," if changed - {*GENERATED} else head


def _git(*words: str) -> str:
    return subprocess.run(("git", *words), capture_output=True, text=True, check=True).stdout

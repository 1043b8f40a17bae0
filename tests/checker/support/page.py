"""docs/coverage.md: each program of `make fuzz` writes its own section and leaves the others."""

import re
from pathlib import Path
from typing import Final

DOCUMENT: Final = Path(__file__).parents[3] / "docs" / "coverage.md"


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

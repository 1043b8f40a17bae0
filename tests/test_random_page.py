"""docs/random.md does what it shows."""

from pathlib import Path

import pytest

from tests.support.readme import run, sections

PAGE = Path(__file__).parents[1] / "docs" / "random.md"
SECTIONS = sections(PAGE.read_text())


@pytest.mark.parametrize("heading", SECTIONS)
def test_the_page_does_what_it_shows(heading: str, tmp_path: Path) -> None:
    run(SECTIONS[heading], tmp_path, PAGE.name)


def test_the_page_has_blocks_on_both_kinds_of_draws() -> None:
    assert list(SECTIONS) == ["Keys", "torch's default generator"]

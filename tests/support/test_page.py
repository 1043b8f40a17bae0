"""A section of the page on coverage is replaced by name, and nothing else is."""

from tests.checker.support.page import DOCUMENT, replaced

PAGE = "# First\n\n| # |\n\n## Second\n\nb\n\n### part\n\nc\n\n## Third\n\nd\n"


def test_a_section_is_replaced_in_its_place() -> None:
    assert replaced(PAGE, "## Second\n\nnew\n") == PAGE.replace("b\n\n### part\n\nc", "new")
    assert replaced(PAGE, "# First\n\nnew\n\n") == PAGE.replace("| # |", "new")
    assert replaced(PAGE, "## Third\n\n- new") == PAGE.replace("\nd\n", "\n- new\n")


def test_a_new_section_comes_last() -> None:
    assert replaced(PAGE, "## Fourth\n\ne") == f"{PAGE}\n## Fourth\n\ne\n"
    assert replaced("", "# First\n\na\n") == "# First\n\na\n"


def test_replacing_a_section_by_itself_changes_nothing() -> None:
    page = DOCUMENT.read_text()
    for part in page.split("\n## ")[1:]:
        assert replaced(page, f"## {part}") == page

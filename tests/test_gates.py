"""The limits of style that no other tool of `make test` checks."""

import ast
import re
import tomllib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Final

import pytest

from shardmap_torch import errors
from tests.support.golden import read

REPO = Path(__file__).parent.parent
FOLDERS = ("shardmap_torch", "ops", "kernels", "tests", "examples", "benchmarks")
SOURCES = sorted(path for folder in FOLDERS for path in (REPO / folder).rglob("*.py"))
RIDDLES = ("What", "Where", "Whether", "How", "Who", "Whom", "Which", "As", "If", "By")
"""First words that put a docstring as a question or lean it on another one."""
RIDDLE: Final = re.compile(f'"""({"|".join(RIDDLES)})\\b')

Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef

ERRORS = [
    value
    for value in vars(errors).values()
    if isinstance(value, type) and issubclass(value, BaseException)
]


def found_in(paths: Iterable[Path], find: Callable[[str], object]) -> dict[str, object]:
    """Findings by file, of the files that have some."""
    found = {str(path.relative_to(REPO)): find(path.read_text()) for path in paths}
    return {name: each for name, each in found.items() if each}


def test_a_finding_is_by_the_name_of_its_file() -> None:
    assert found_in([Path(__file__)], len).keys() == {"tests/test_gates.py"}


def riddles(source: str) -> list[str]:
    """The first lines of docstrings that do not start with a verb or name a thing."""
    if not RIDDLE.search(source):  # ten times faster than to parse it
        return []
    statements = [
        statement
        for node in ast.walk(ast.parse(source))
        if isinstance(node, Documented)
        for statement in node.body
        if isinstance(statement, ast.Expr)
    ]
    values = [each.value.value for each in statements if isinstance(each.value, ast.Constant)]
    return [
        text.splitlines()[0]
        for text in values
        if isinstance(text, str) and (text.split() or [""])[0].strip(",.:") in RIDDLES
    ]


def test_a_docstring_that_begins_with_a_question_word_is_seen() -> None:
    source = (
        '"""Adds."""\nX = 1\n"""How many."""\ndef f():\n    """Whether it is.\n\n    b\n    """\n'
    )
    assert riddles(source) == ["How many.", "Whether it is."]


def test_a_docstring_starts_with_a_verb_or_names_a_thing() -> None:
    assert found_in(SOURCES, riddles) == {}


PRIVATE: Final = re.compile(
    r"\b(held|holds?)\b[^.;:]{0,60}\bagainst\b|still to be (taken|summed|reduced|added)|misfits?\b"
    r"|\b(un)?sealed\b|\bcut (in|into|along|over)\b|\bstorage cells?\b",
    re.IGNORECASE,
)
"""Private words, for which docs/architecture.md has those of the field."""

TEXTS = [*SOURCES, *sorted(REPO.glob("docs/*.md")), REPO / "README.md"]


def private_words(text: str) -> list[str]:
    """The private words in a text; strings and lines that go on are read as one."""
    joined = re.sub(r"\s+(#\s+)?", " ", re.sub(r'"\s+f?"', "", text))
    return [found.group() for found in PRIVATE.finditer(joined)]


def test_a_private_word_is_seen_across_lines_and_strings() -> None:
    text = '"is not held "\n    f"against one device"\n# a sum still\n# to be taken; cut here'
    assert private_words(text) == ["held against", "still to be taken"]


def test_words_are_those_of_the_field() -> None:
    assert found_in([path for path in TEXTS if path != Path(__file__)], private_words) == {}


def test_mypy_checks_every_source_folder() -> None:
    """All but ops and kernels, which it reaches through the links in shardmap_torch."""
    checked = tomllib.loads((REPO / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    present = {path.relative_to(REPO).parts[0] for path in SOURCES}
    assert set(checked) == present - {"ops", "kernels"}


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: error.__name__)
def test_no_error_is_a_type_error(error: type[BaseException]) -> None:
    """Raised inside `a + b`, Python replaces a TypeError by its own and our text is lost."""
    assert not issubclass(error, TypeError)


TESTS = [path for path in SOURCES if path.name.startswith("test_")]


def imported_tests(source: str) -> list[str]:
    """The modules of tests that a source imports from."""
    if not re.search(r"^from \S+\.test_", source, re.MULTILINE):
        return []
    nodes = ast.walk(ast.parse(source))
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    return [module for module in modules if module.split(".")[-1].startswith("test_")]


def test_helpers_are_imported_from_support_and_not_from_tests() -> None:
    assert found_in(TESTS, imported_tests) == {}


def test_an_import_from_a_module_of_tests_is_seen() -> None:
    source = "from tests.support.pool import gloo\nfrom tests.test_mesh import MESH\n"
    assert imported_tests(source) == ["tests.test_mesh"]


def test_recorded_results_lie_beside_no_code() -> None:
    assert list((REPO / "tests/golden").glob("*.py")) == []


def test_recorded_texts_are_those_of_tests_that_exist() -> None:
    sources = "".join(path.read_text() for path in SOURCES)
    pages = (REPO / "tests/golden").glob("*.txt")
    assert [name for page in pages for name in read(page) if name not in sources] == []


def test_the_readme_has_at_most_180_lines() -> None:
    assert len((REPO / "README.md").read_text().splitlines()) <= 180

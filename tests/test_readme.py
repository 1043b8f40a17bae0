"""Every block of the README and of docs/ runs and prints what the page shows."""

from pathlib import Path

import pytest

from tests.support import readme

REPO = Path(__file__).parent.parent
PAGES = [*REPO.glob("README.md"), *sorted(REPO.glob("docs/**/*.md"))]
SECTIONS = [
    pytest.param(
        page,
        blocks,
        id=f"{page.name}: {title}",
        marks=[pytest.mark.slow]
        * any(block.language in ("console", readme.CELL) for block in blocks),
    )
    for page in PAGES
    for title, blocks in readme.sections(page.read_text()).items()
]

PAGE = """# Title

```python
# double.py
x = 2
print(2 * x)
```

which prints

```text
4
```

```console
$ python double.py
4
```

<!-- not run: takes minutes -->
```console
$ make demo
```

## Next

```python
y = 1
```
"""
NOTEBOOK = """# Title

```{toctree}
nothing to run
```

```{code-cell} ipython3
z = 3
```

## Next

```{code-cell} ipython3
print(12 // z)
```
"""


@pytest.mark.usefixtures("repairs")
@pytest.mark.parametrize(("page", "blocks"), SECTIONS)
def test_every_block_of_a_page_runs_and_prints_what_is_shown(
    page: Path, blocks: list[readme.Block], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    (tmp_path / "examples").symlink_to(REPO / "examples")
    commands = {block.text.split()[1] for block in blocks if block.language == "console"}
    # The README's own command starts its processes, as its readers do.
    pooled = "torchrun" in commands and page.name != "README.md"
    gloo = request.getfixturevalue("gloo") if pooled else None
    readme.run(blocks, tmp_path, str(page), gloo)


def run_page(page: str, folder: Path) -> None:
    for blocks in readme.sections(page).values():
        readme.run(blocks, folder, "page.md")


def test_blocks_are_grouped_by_heading_and_excused_ones_left_out() -> None:
    found = readme.sections(PAGE)
    assert {title: [block.language for block in blocks] for title, blocks in found.items()} == {
        "Title": ["python", "text", "console"],
        "Next": ["python"],
    }


def test_cells_of_a_notebook_are_one_section_and_directives_are_left_out(tmp_path: Path) -> None:
    found = readme.sections(NOTEBOOK)
    assert [block.line for block in found["the notebook"]] == [8, 14]
    assert len(found) == 1
    run_page(NOTEBOOK, tmp_path)
    with pytest.raises(ZeroDivisionError):
        run_page(NOTEBOOK.replace("z = 3", "z = 0"), tmp_path)


def test_a_page_that_shows_what_it_prints_passes(tmp_path: Path) -> None:
    run_page(PAGE, tmp_path)


@pytest.mark.parametrize(
    ("old", "new", "line"),
    [
        ("4\n```\n\n```console", "5\n```\n\n```console", 4),
        ("double.py\n4", "double.py\n5", 16),
        ("y = 1", "print('unseen')", 28),
        ("```python\ny", "```bash\ny", 28),
        ("```python\ny", "```text\ny", 28),
    ],
    ids=[
        "wrong output",
        "wrong output of a command",
        "output not shown",
        "unknown language",
        "stray output",
    ],
)
def test_a_page_that_shows_something_else_fails_and_names_the_line(
    tmp_path: Path, old: str, new: str, line: int
) -> None:
    assert old in PAGE
    with pytest.raises(AssertionError, match=f"line {line}"):
        run_page(PAGE.replace(old, new), tmp_path)


@pytest.mark.parametrize(
    ("name", "line"), [("# double.py\n", 3), ("", 5)], ids=["named", "unnamed"]
)
def test_an_error_in_a_block_has_the_line_of_its_file_or_else_of_the_page(
    tmp_path: Path, name: str, line: int
) -> None:
    page = PAGE.replace("print(2", "print(1 / 0").replace("# double.py\n", name)
    with pytest.raises(ZeroDivisionError) as error:
        run_page(page.partition("which")[0], tmp_path)
    assert error.traceback[-1].lineno + 1 == line


def test_a_line_of_the_page_which_moves_with_it_must_not_be_shown(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match=r"line 4: it shows a line of the page"):
        run_page("# Title\n\n```python\nprint('page.md:4')\n```\n", tmp_path)

"""The site: every public name has its entry, every page its place, every link its target."""

import importlib
import re
from pathlib import Path

import pytest

import shardmap_torch

REPO = Path(__file__).parent.parent
DOCS = REPO / "docs"
PAGES = sorted(DOCS.rglob("*.md"))
ENTRY = re.compile(r"^\.\. (?:auto(?!module)|py:)\w+:: shardmap_torch\.([\w.]+)", re.MULTILINE)
LINK = re.compile(r"\]\(([^)#\s]*)(?:#([\w-]+))?\)")
MODULES = ["nn", "optim", "lax", "planning", "random", "saving", "kernels", "testing", "parallel"]


def test_the_reference_has_every_public_name_once() -> None:
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").rglob("*.md")))
    expected = [*shardmap_torch.__all__]
    for module in MODULES:
        names = {*importlib.import_module(f"shardmap_torch.{module}").__all__}
        if module == "parallel":  # most of its names are those of the package
            names -= {*shardmap_torch.__all__}
        expected += [f"{module}.{name}" for name in names]
    assert sorted(ENTRY.findall(pages)) == sorted(expected)


TREE = re.compile(r"^```\{toctree\}\n(.*?)^```", re.MULTILINE | re.DOTALL)


def entries(page: Path) -> list[str]:
    """Returns the pages that the toctrees of a page list, as paths below docs/."""
    lines = "\n".join(TREE.findall(page.read_text())).splitlines()
    names = [re.sub(r".* <(.*)>", r"\1", line) for line in lines if line and line[0] != ":"]
    return [str((page.parent / name).resolve().relative_to(DOCS)) for name in names]


def test_the_toctrees_have_every_page_once() -> None:
    listed = [name for page in PAGES for name in entries(page)]
    names = [str(page.relative_to(DOCS).with_suffix("")) for page in PAGES]
    assert sorted([*listed, "index"]) == sorted(names)


def test_the_sidebar_fits_a_screen() -> None:
    assert len(entries(DOCS / "index.md")) <= 24


def anchors(page: Path) -> set[str]:
    """Returns the anchors that MyST makes of the headings."""
    titles = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title).strip().lower().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [REPO / "README.md", *PAGES], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    assert not re.search(r"^(<<<<<<<|>>>>>>>) ", page.read_text(), re.MULTILINE), "a merge is open"
    prose = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for target, anchor in LINK.findall(prose):
        if target.startswith("https://"):
            continue
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


def test_an_import_of_all_names_replaces_no_module_that_scripts_import_from_torch() -> None:
    assert {"distributed", "functional", "nn", "optim", "random"}.isdisjoint(shardmap_torch.__all__)

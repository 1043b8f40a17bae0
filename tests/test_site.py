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
    pages = "\n".join(page.read_text() for page in sorted((DOCS / "reference").glob("*.md")))
    expected = [*shardmap_torch.__all__]
    for module in MODULES:
        names = {*importlib.import_module(f"shardmap_torch.{module}").__all__}
        if module == "parallel":  # most of its names are those of the package
            names -= {*shardmap_torch.__all__}
        expected += [f"{module}.{name}" for name in names]
    assert sorted(ENTRY.findall(pages)) == sorted(expected)


def test_the_index_has_every_page_once() -> None:
    index = (DOCS / "index.md").read_text()
    listed = [
        line
        for tree in re.findall(r"^```\{toctree\}\n(.*?)^```", index, re.MULTILINE | re.DOTALL)
        for line in tree.splitlines()
        if line and not line.startswith(":")
    ]
    names = [str(page.relative_to(DOCS).with_suffix("")) for page in PAGES]
    assert sorted([*listed, "index"]) == sorted(names)


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

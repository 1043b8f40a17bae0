"""docs/architecture.md names files that are there, and every package of the product."""

import re
from pathlib import Path

REPO = Path(__file__).parent.parent
PAGE = (REPO / "docs" / "architecture.md").read_text()
PLACES = re.findall(r"`([\w*/.]+(?:/|\.py))`", PAGE)
# Folders in which a path of the page may be, besides the repository: it leaves out what is clear.
ROOTS = ("", "shardmap_torch", "shardmap_torch/checker", "shardmap_torch/collectives", "kernels")


def test_every_path_on_the_page_exists() -> None:
    gone = [
        place
        for place in PLACES
        if not any(list((REPO / root).glob(place.rstrip("/"))) for root in ROOTS)
    ]
    assert gone == []


def test_every_package_of_the_product_is_on_the_page() -> None:
    folders = [path.parent for path in (REPO / "shardmap_torch").rglob("__init__.py")]
    names = {str(path.relative_to(REPO)) for path in folders if path.parent != REPO}
    assert {name for name in names if f"`{name}/`" not in PAGE} == set()

"""docs/collectives.md and the page of each collective say what the table says."""

import shardmap_torch
from shardmap_torch import ops
from shardmap_torch.collectives.table import ROWS, TABLE
from tests.support.collectives_page import FOLDER, MOVES, PAGE, page, pages


def test_the_pages_of_the_collectives_are_up_to_date() -> None:
    paths = [PAGE, *FOLDER.glob("*.md")]
    assert {path: path.read_text() for path in paths} == pages(), (
        "run python -m tests.support.collectives_page"
    )


def test_the_page_has_every_row_both_ways_and_every_function() -> None:
    text = page()
    for row in ROWS:
        back = TABLE[row.transpose]
        line = next(
            line
            for line in text.splitlines()
            if line.startswith(f"| `{row.name}` | {row.src} → {row.dst} |")
        )
        assert line.endswith(f"| `{back.name}` | {back.src} → {back.dst} | {back.sent} |")
    for name in ops.__all__:
        assert f"| [`{name}(" in text


def test_every_move_is_described() -> None:
    assert set(MOVES) == {row.move for row in ROWS}


def test_dir_lists_the_public_names() -> None:
    assert dir(shardmap_torch) == sorted(shardmap_torch.__all__)

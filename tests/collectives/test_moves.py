"""Every movement of data is known wherever it has to be, so that a new one cannot be half there."""

from collections.abc import Collection

import pytest

from shardmap_torch.backends import local, process_group, reference
from shardmap_torch.checker.spmd import collective_rules
from shardmap_torch.collectives.moves import MOVES
from shardmap_torch.collectives.table import ROWS

EVERY = set(MOVES)
LOCAL = {name for name, move in MOVES.items() if move.local}
PARTS = {
    "backends/reference.py": (reference.MOVES, EVERY - LOCAL | {"slice", "pad", "mask", "same"}),
    "backends/local.py": (local.LOCAL, LOCAL),
    "backends/process_group.py": (process_group.MOVES, EVERY - LOCAL),
    "checker/spmd/collective_rules.py": (collective_rules._MOVES, EVERY),
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_exactly_the_movements_it_needs(part: str) -> None:
    table, needed = PARTS[part]
    missing, unknown = needed - set(table), set(table) - EVERY
    assert not missing, f"{part} lacks {sorted(missing)}"
    assert not unknown, f"{part} has {sorted(unknown)}, which collectives/moves.py lacks"


def test_every_row_names_a_movement() -> None:
    moves: Collection[str] = MOVES
    assert [row.key for row in ROWS if row.move not in moves] == []

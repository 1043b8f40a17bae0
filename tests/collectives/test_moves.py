"""Every movement of data is known wherever it has to be, so that a new one cannot be half there."""

from collections.abc import Collection
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, make_mesh, shard_map
from shardmap_torch.backends import process_group, rank, reference
from shardmap_torch.checker.spmd.ops import collective_rules
from shardmap_torch.collectives.moves import MOVEMENTS
from shardmap_torch.collectives.table import ROWS
from shardmap_torch.mixing import backend
from shardmap_torch.ops import all_gather, all_reduce, all_to_all, ppermute, reduce_scatter
from shardmap_torch.types import Partial, R
from tests.support.pool import Gloo

EVERY = set(MOVEMENTS)
LOCAL = {name for name, move in MOVEMENTS.items() if move.local}
PARTS = {
    "backends/reference.py": (
        reference.REFERENCE,
        EVERY - LOCAL | {"slice", "pad", "mask", "same"},
    ),
    "backends/rank.py": (rank.LOCAL_MOVEMENTS, LOCAL),
}
OPTIONAL = {
    "backends/process_group.py": process_group.WIRE,
    "checker/spmd/ops/collective_rules.py": collective_rules._MOVES,
    "mixing/backend.py": backend._DIMS,
}


@pytest.mark.parametrize("part", PARTS)
def test_a_part_has_exactly_the_movements_it_needs(part: str) -> None:
    table, needed = PARTS[part]
    missing, unknown = needed - set(table), set(table) - EVERY
    assert not missing, f"{part} lacks {sorted(missing)}"
    assert not unknown, f"{part} has {sorted(unknown)}, which collectives/moves.py lacks"


@pytest.mark.parametrize("part", OPTIONAL)
def test_a_part_that_knows_what_to_do_without_has_no_unknown_movement(part: str) -> None:
    unknown = set(OPTIONAL[part]) - EVERY
    assert not unknown, f"{part} has {sorted(unknown)}, which collectives/moves.py lacks"


def test_every_row_names_a_movement() -> None:
    moves: Collection[str] = MOVEMENTS
    assert [row.key for row in ROWS if row.move not in moves] == []


def everything(x: Tensor) -> tuple[Tensor, ...]:
    total = all_reduce(x, "tp", src=Partial, dst=R)
    return (
        total,
        all_gather(x, "tp", dim=1, dst=R),
        reduce_scatter(x, "tp", dim=0),
        all_to_all(x, "tp", split_dim=0, concat_dim=1),
        ppermute(x, "tp", [(0, 1)]),
    )


def all_moves() -> list[Any]:
    out_specs = P(replicate="tp"), P(replicate="tp"), P("tp"), P("tp"), P("tp")
    f = shard_map(
        everything,
        mesh=make_mesh((2,), ("tp",), kind="process_group"),
        in_specs=P("tp"),
        out_specs=out_specs,
        check=False,
    )
    x = torch.arange(32.0).reshape(8, 4)
    return [y.full_tensor() if hasattr(y, "full_tensor") else y for y in f(x)]


def all_moves_by_gathering() -> list[Any]:
    gather = {"gather": process_group.WIRE["gather"]}  # by which DTensors are put together
    with mock.patch.object(process_group, "WIRE", gather):
        return all_moves()


def test_a_movement_that_process_groups_lack_is_done_to_what_all_ranks_gathered(gloo: Gloo) -> None:
    pool = gloo(2)
    for expected, got in zip(pool.run(all_moves), pool.run(all_moves_by_gathering), strict=True):
        for a, b in zip(expected, got, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)

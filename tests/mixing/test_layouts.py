"""Values that cross the boundary are sharded over automatic axes by these specs."""

from torch.distributed.tensor import Partial, Placement, Replicate, Shard

from shardmap_torch import P, make_mesh
from shardmap_torch.mixing.layouts import (
    automatic_axes,
    body_placements,
    entry_spec,
    evenly,
    exit_spec,
    replicated,
    settled,
)
from tests.programs.support.harness import random

MESH = make_mesh((2, 2, 2), ("dp", "tp", "pp"), kind="abstract")
AUTO = ("dp", "pp")


def test_axes_that_are_not_bound_are_automatic_in_mesh_order() -> None:
    assert automatic_axes(MESH, frozenset({"tp"})) == AUTO


def test_automatic_axes_are_the_minor_ones_of_what_leaves() -> None:
    placements: tuple[Placement, ...] = (Shard(1), Shard(1))
    assert exit_spec(MESH, P("tp"), AUTO, placements) == P("tp", ("dp", "pp"))
    assert exit_spec(MESH, P(None, "tp"), AUTO, placements) == P(None, ("tp", "dp", "pp"))
    assert exit_spec(MESH, P(partial={"tp"}), AUTO, replicated(2)) == P(partial={"tp"})
    assert body_placements(MESH, P(None, ("tp", "dp")), AUTO) == (Shard(1), Replicate())


def test_a_plain_argument_enters_by_its_spec() -> None:
    assert entry_spec(MESH, P("tp"), AUTO, random((4,), 0)) == P("tp")
    assert entry_spec(MESH, P("tp"), AUTO, 3) == P("tp")


def test_pending_sums_stay_for_what_is_linear_only() -> None:
    both: tuple[Placement, ...] = (Partial(), Partial("max"))
    assert settled(both) == replicated(2)
    assert settled(both, linear=True) == (Partial(), Replicate())


def test_moved_dims_and_uneven_ones_are_not_sharded() -> None:
    placements: tuple[Placement, ...] = (Shard(0), Shard(1))
    assert settled(placements, moved=[0]) == (Replicate(), Shard(1))
    assert evenly(placements, (3, 4), (2, 2)) == (Replicate(), Shard(1))
    assert evenly((Shard(0), Shard(0)), (6, 1), (2, 2)) == replicated(2)

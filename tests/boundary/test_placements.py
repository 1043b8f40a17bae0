"""Placements of DTensor against the shards that a spec gives, in any order of the axes."""

from itertools import permutations, product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor import _dtensor_spec as private
from torch.distributed.tensor.placement_types import _StridedShard

from shardmap_torch import Mesh, P, device_put, make_mesh
from shardmap_torch.boundary.placements import placements_of, spec_of
from shardmap_torch.boundary.shards import locals_of
from tests.programs.support.everywhere import run_on, same
from tests.programs.support.harness import random
from tests.support.pool import Gloo

CUBE = make_mesh((2, 3, 2), ("a", "b", "c"), kind="simulated")
GRID = (2, 2), ("a", "b")
ORDERS = [axes for n in (1, 2, 3) for axes in permutations("abc", n)]


def test_placements_follow_the_mesh_order() -> None:
    assert placements_of(CUBE, P("c", "a", partial="b")) == (Shard(1), Partial(), Shard(0))
    assert placements_of(CUBE, P(("a", "c"))) == (Shard(0), Replicate(), Shard(0))
    assert placements_of(CUBE, P(("c", "a"))) == (
        _StridedShard(0, split_factor=2),
        Replicate(),
        Shard(0),
    )


@pytest.mark.parametrize("axes", ORDERS)
def test_torch_cuts_by_the_placements_as_the_spec_does(axes: tuple[str, ...]) -> None:
    x = torch.arange(24.0)
    shards = locals_of(x, P(axes), CUBE)
    for rank in range(CUBE.size):
        place, shard = CUBE.coordinates(rank), x
        for axis, placement in zip(CUBE.axis_names, placements_of(CUBE, P(axes)), strict=True):
            if not isinstance(placement, Replicate):
                parts: list[Tensor] = placement._split_tensor(  # type: ignore[attr-defined]
                    shard, CUBE.shape[axis], with_padding=False, contiguous=True
                )[0]
                shard = parts[place[axis]]
        assert torch.equal(shard, shards[rank])


SPECS = [
    *(P(axes) for axes in ("a", "b", ("a", "b"), ("b", "a"))),
    *(P(None, axes) for axes in ("b", ("b", "a"))),
    *(P("b", "a"), P(), P(partial="a"), P(partial={"a", "b"}), P("b", partial="a")),
]


def from_each_to_each(mesh: Mesh) -> None:
    """Enters by one spec what lies by another; its gradient must lie as it does."""
    x, cotangent = random((4, 8), 0), random((4, 8), 1)
    for src, dst in product(SPECS, SPECS):
        given = device_put(x, mesh, src).detach()
        if isinstance(given, DTensor):
            found = spec_of(given, mesh)
            assert isinstance(found, P)
            assert placements_of(mesh, found) == given.placements
        y = device_put(given.requires_grad_(), mesh, dst)
        same(y, x)
        back = device_put(cotangent, mesh, P("a")) if isinstance(y, DTensor) else cotangent
        (grad,) = torch.autograd.grad(y, given, back)
        same(grad, cotangent)


def test_a_dtensor_enters_by_any_spec_from_any_other(gloo: Gloo) -> None:
    run_on("gloo", from_each_to_each, gloo, *GRID)


def _sum(y: Tensor) -> Tensor:
    return y.sum(1)


def _twice(y: Tensor) -> Tensor:
    return 2 * y


def computed_with(mesh: Mesh) -> None:
    """torch computes right with a DTensor whose tuple is out of mesh order."""
    x = random((8, 4), 0)
    y = device_put(x, mesh, P(("b", "a")))
    for f in (
        torch.detach,
        torch.t,
        lambda y: y.sum(1),
        lambda y: y.view(8, 2, 2),
        lambda y: 2 * y,
    ):
        same(f(y), f(x))
    leaf = y.detach().requires_grad_()
    (leaf * leaf).sum().backward()
    same(leaf.grad, 2 * x)


def test_torch_computes_with_a_tuple_out_of_mesh_order(gloo: Gloo) -> None:
    run_on("gloo", computed_with, gloo, *GRID)


def ordered_by_torch(mesh: Mesh) -> None:
    """A DTensor with torch's own shard order enters by it, or by any other spec."""
    assert mesh.device_mesh is not None
    x = random((8, 4), 0)
    local = device_put(x, mesh, P(("b", "a")))._local_tensor  # type: ignore[attr-defined]
    in_order = distribute_tensor(x, mesh.device_mesh, [Shard(0), Shard(0)])
    known = private.DTensorSpec(
        mesh.device_mesh,
        (Shard(0), Shard(0)),
        tensor_meta=in_order._spec.tensor_meta,
        shard_order=(private.ShardOrderEntry(tensor_dim=0, mesh_dims=(1, 0)),),
    )
    y = DTensor.__new__(DTensor, local, known, requires_grad=False)
    same(y, x)
    assert spec_of(y, mesh) == P(("b", "a"))
    for spec in SPECS:
        same(device_put(y, mesh, spec), x)


def test_a_shard_order_of_torch_enters_as_what_it_is(gloo: Gloo) -> None:
    run_on("gloo", ordered_by_torch, gloo, *GRID)

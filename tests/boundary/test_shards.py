"""Cutting and joining global tensors against indices computed by hand."""

from math import prod

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from shardmap_torch import Mesh, P, make_mesh
from shardmap_torch.boundary.shards import global_of, join, locals_of, split

NAMES = ("a", "b", "c")


@st.composite
def layouts(draw: st.DrawFn) -> tuple[Mesh, P, torch.Tensor]:
    """A mesh of up to three axes, a spec that shards over some, and a tensor that it shards."""
    num_axes = draw(st.integers(1, 3))
    sizes = draw(st.lists(st.integers(1, 3), min_size=num_axes, max_size=num_axes))
    mesh = make_mesh(sizes, NAMES[:num_axes], kind="simulated")
    order = draw(st.permutations(mesh.axis_names))
    ndim = draw(st.integers(0, 3))
    place = {axis: draw(st.integers(-2, ndim - 1)) for axis in order}
    entries = [tuple(axis for axis in order if place[axis] == dim) or None for dim in range(ndim)]
    partial = [axis for axis in order if place[axis] == -2 and draw(st.booleans())]
    shape = [
        draw(st.integers(0, 2)) * prod(mesh.shape[axis] for axis in axes or ()) for axes in entries
    ]
    x = torch.arange(prod(shape)).reshape(shape)
    return mesh, P(*entries, partial=partial), x


def shard_of(x: torch.Tensor, spec: P, mesh: Mesh, rank: int) -> torch.Tensor:
    """The shard of one rank, by plain indexing; nothing where it is a later addend."""
    place = mesh.coordinates(rank)
    array = x.numpy()
    for dim, axes in spec.sharded_dims:
        index = 0
        for axis in axes:
            index = index * mesh.shape[axis] + place[axis]
        shards = np.split(array, prod(mesh.shape[axis] for axis in axes), axis=dim)
        array = shards[index]
    later = any(place[axis] > 0 for axis in spec.partial)
    return torch.from_numpy(np.zeros_like(array) if later else array)


@given(layouts())
def test_each_rank_gets_its_piece_of_the_global_tensor(case: tuple[Mesh, P, torch.Tensor]) -> None:
    mesh, spec, x = case
    for rank, local in enumerate(locals_of(x, spec, mesh)):
        assert torch.equal(local, shard_of(x, spec, mesh, rank))


@given(layouts())
def test_joining_undoes_cutting(case: tuple[Mesh, P, torch.Tensor]) -> None:
    mesh, spec, x = case
    assert torch.equal(global_of(locals_of(x, spec, mesh), spec, mesh), x)
    shards, axes = split(x, spec, mesh)
    assert torch.equal(join(shards, spec, mesh, axes), x)
    assert list(axes) == [axis for axis in mesh.axis_names if axis in axes]


def test_a_partial_value_is_the_sum_over_its_ranks() -> None:
    mesh = make_mesh((3,), ("a",), kind="simulated")
    values = [torch.tensor([r, 1], dtype=torch.int8) for r in range(3)]
    total = global_of(values, P(partial="a"), mesh)
    assert total.tolist() == [3, 3]
    assert total.dtype == torch.int8

"""Programs made from any two specs: how a value enters and how the result leaves."""

from dataclasses import dataclass
from math import prod

import torch
from hypothesis import strategies as st
from torch import Tensor

from shardmap_torch import I, P, R, V, all_gather, all_reduce, convert
from tests.programs.support.harness import Program

NAMES = ("a", "b", "c")


@dataclass(frozen=True)
class Through:
    """Makes a value that entered by one spec whole, changes it, and lets it leave by another."""

    source: P
    target: P

    def __call__(self, x: Tensor) -> tuple[Tensor]:
        for dim, axes in self.source.sharded_dims:
            x = all_gather(x, axes, dim=dim, dst=R)
        if self.source.partial:
            x = all_reduce(x, sorted(self.source.partial), dst=R)
        if self.source.invariant:
            x = convert(x, sorted(self.source.invariant), src=I, dst=R)
        x = reference(x)[0]
        for dim, axes in self.target.sharded_dims:
            x = convert(x, axes, src=R, dst=V, dim=dim)
        for axis, kind in self.target.types.items():
            if kind.dim is None and kind != R:
                x = convert(x, axis, src=R, dst=kind)
        return (x,)


def reference(x: Tensor) -> tuple[Tensor]:
    y = torch.tanh(x)
    return (y * y.abs(),)


@st.composite
def specs(draw: st.DrawFn, axis_names: tuple[str, ...], ndim: int) -> P:
    """Cuts some dims over some axes, in any order, and types the other axes."""
    order = draw(st.permutations(axis_names))
    place = {axis: draw(st.integers(-3, ndim - 1)) for axis in order}
    entries = [tuple(axis for axis in order if place[axis] == dim) or None for dim in range(ndim)]
    typed = {
        word: [axis for axis in order if place[axis] == at]
        for word, at in [("replicate", -1), ("invariant", -2), ("partial", -3)]
    }
    return P(*entries, **typed)


@st.composite
def programs(draw: st.DrawFn, num_ranks: int | None = None) -> Program:
    """A program on a mesh of one to three axes, of `num_ranks` ranks if that is given."""
    sizes = draw(st.sampled_from(SHAPES[num_ranks]))
    names = NAMES[: len(sizes)]
    ndim = draw(st.integers(0, 2))
    source, target = draw(specs(names, ndim)), draw(specs(names, ndim))
    shape = tuple(
        prod(sizes) * draw(st.integers(0, 1)) + prod(sizes) * (dim == 0) for dim in range(ndim)
    )
    meshes = {prod(sizes): sizes}
    return Program(
        Through(source, target), (source,), (target,), (shape,), reference, meshes, names
    )


SHAPES: dict[int | None, list[tuple[int, ...]]] = {
    None: [(1,), (2,), (3,), (2, 2), (2, 3), (3, 1), (2, 1, 2), (2, 2, 2)],
    2: [(2,), (1, 2), (2, 1)],
    4: [(4,), (2, 2), (1, 2, 2)],
}

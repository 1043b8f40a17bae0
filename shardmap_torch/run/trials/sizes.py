"""Smaller meshes and sizes, at which programs are tried that are too large to be."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import torch

from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P

MAX_RANKS: Final = 64

_FEW: Final = 4
"""Ranks along an axis that is made shorter: with two, those before and after are the same."""

_DIVISORS: Final = (1, 4, 16, 64, 256, 1024)


@dataclass(frozen=True)
class Scale:
    """The size of each axis, and by what lengths of dims are divided where all ranks can do so."""

    axes: Mapping[str, int]
    divisor: int

    def of(self, axes: frozenset[str]) -> Mapping[str, int]:
        """Returns the sizes of these axes."""
        return {axis: size for axis, size in self.axes.items() if axis in axes}

    def is_whole(self, mesh: Mesh, axes: frozenset[str]) -> bool:
        """Returns whether these axes are as long as in the mesh."""
        return self.of(axes) == {axis: mesh.shape[axis] for axis in self.of(axes)}

    def shape(self, shape: torch.Size, spec: P | None, mesh: Mesh) -> torch.Size:
        """Returns the shape of an argument: shards stay as long as they are, but for the divisor.

        Example:
            >>> import torch
            >>> from shardmap_torch import P, make_mesh
            >>> mesh = make_mesh((512,), ("tp",), kind="abstract")
            >>> Scale({"tp": 4}, 1).shape(torch.Size([1024, 3]), P("tp"), mesh)
            torch.Size([8, 3])
        """
        sharded = {} if spec is None else dict(spec.sharded_dims)
        return torch.Size(
            [self._length(size, sharded.get(dim, ()), mesh) for dim, size in enumerate(shape)]
        )

    def _length(self, size: int, axes: Sequence[str], mesh: Mesh) -> int:
        most = prod(self.axes.values())
        own = size // prod(mesh.shape[axis] for axis in axes)
        shards = prod(self.axes[axis] for axis in axes)
        unit = self.divisor * most // shards
        return shards * (own // self.divisor if own % unit == 0 else own)


def scales(mesh: Mesh, axes: frozenset[str]) -> Iterator[Scale]:
    """Yields sizes at which a program with ranks along these axes may be tried, largest first."""
    sizes = {axis: mesh.shape[axis] for axis in mesh.axis_names}
    for few in (max(sizes.values()), _FEW, _FEW - 1, 2):
        found = {axis: min(size, few) if axis in axes else size for axis, size in sizes.items()}
        if prod(size for axis, size in found.items() if axis in axes) <= MAX_RANKS:
            for divisor in _DIVISORS:
                yield Scale(found, divisor)
            return

"""Grid: ranks laid out along named axes, numbered row-major."""

from collections.abc import Mapping, Sequence
from math import prod
from types import MappingProxyType

from shardmap_torch.errors import MeshError, show


class Grid:
    """The layout of a mesh: its axes, and the place of each rank on them.

    Attributes:
        axis_names: one name per axis, major first.
        axis_sizes: ranks along each axis.
        aliases: names that stand for several axes, the first of them major.
    """

    axis_names: tuple[str, ...]
    axis_sizes: tuple[int, ...]
    aliases: tuple[tuple[str, tuple[str, ...]], ...]
    _sizes: dict[str, int]

    @property
    def shape(self) -> Mapping[str, int]:
        """Mapping of axis names to axis sizes, in order, and then of those of views.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> make_mesh((2, 4), ("dp", "tp"), kind="simulated").shape["tp"]
            4
        """
        # Made again: Dynamo traces a proxy of a dict that it has seen made, and of no other.
        sizes = dict(zip(self.axis_names, self.axis_sizes, strict=True))
        if self.aliases:
            sizes.update(self._sizes)
        return MappingProxyType(sizes)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return prod(self.axis_sizes)

    def num_ranks(self, axes: Sequence[str]) -> int:
        """Returns the number of ranks along several axes together."""
        sizes = self._sizes
        if len(axes) == 1:
            return sizes[axes[0]]
        return prod([sizes[axis] for axis in axes])

    def finest(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Replaces axes of views by the finest axes that make them up; leaves other names alone.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> views = [{"edp": 2, "ep": 4}]
            >>> mesh = make_mesh((4, 2), ("dp", "cp"), kind="simulated", views=views)
            >>> mesh.finest(["ep"])
            ('dp&ep', 'cp')
        """
        if not self.aliases:
            return tuple(axes)
        aliases = dict(self.aliases)
        return tuple(part for axis in axes for part in aliases.get(axis, (axis,)))

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the index of `rank` on each axis.

        Example:
            >>> from shardmap_torch import make_mesh
            >>> make_mesh((2, 4), ("dp", "tp"), kind="simulated").coordinates(5)
            {'dp': 1, 'tp': 1}
        """
        place: dict[str, int] = {}
        for axis, size in zip(reversed(self.axis_names), reversed(self.axis_sizes), strict=True):
            rank, place[axis] = divmod(rank, size)
        return {axis: place[axis] for axis in self.axis_names}

    def rank_at(self, place: Mapping[str, int]) -> int:
        """Returns the rank at these coordinates; inverse of `coordinates`."""
        rank = 0
        for axis, size in zip(self.axis_names, self.axis_sizes, strict=True):
            rank = rank * size + place[axis]
        return rank

    def index(self, axes: Sequence[str], place: Mapping[str, int]) -> int:
        """Returns the position along several axes together, the first of them major."""
        sizes, index = self._sizes, 0
        for axis in self.finest(axes) if self.aliases else axes:
            index = index * sizes[axis] + place[axis]
        return index

    def peers(self, axes: Sequence[str], place: Mapping[str, int]) -> tuple[int, ...]:
        """Returns the ranks that differ from `place` along `axes` only, in the order of `index`."""
        places = [dict(place)]
        for axis in self.finest(axes):
            places = [{**p, axis: i} for p in places for i in range(self.shape[axis])]
        return tuple(self.rank_at(p) for p in places)

    def in_order(self, axes: Sequence[str]) -> tuple[str, ...]:
        """Returns the finest axes of `axes` in the order of the mesh.

        Raises:
            MeshError: the mesh lacks one of them.
        """
        finest = self.finest((axes,) if isinstance(axes, str) else axes)
        unknown = [axis for axis in finest if axis not in self.axis_names]
        if unknown or not finest:
            raise MeshError(f"No axes {show(axes)} in the {self}.")
        return tuple(axis for axis in self.axis_names if axis in finest)

"""Crossing: the casts at the boundary of a nested shard_map."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardmap_torch.checker.ir.outcomes import Cast, Where
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import lazy


@dataclass(eq=False)
class Crossing:
    """Conversions of the inputs or results at a boundary, on all paths that reach it."""

    casts: dict[Where, tuple[Cast, ...]] = field(default_factory=dict)

    @lazy
    def collectives(self) -> Mapping[int, tuple[Collective, ...]]:
        """The conversions of each value, by its position; read only after all were added."""
        conversions: dict[int, tuple[Collective, ...]] = {}
        for (position, axis), casts in self.casts.items():
            made = tuple(Collective(name, src, dst, (axis,)) for name, src, dst in casts)
            conversions[position] = conversions.get(position, ()) + made
        return conversions

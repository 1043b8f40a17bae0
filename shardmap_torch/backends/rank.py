"""Base of the backends of one rank, a thread or a process."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch.backends.local import LOCAL
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.mesh import Mesh


class RankBackend:
    """One rank: knows its place, does local moves itself, and leaves the rest to a subclass."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        """Places `rank` on `mesh`."""
        self.mesh = mesh
        self.rank = rank
        self.place = mesh.coordinates(rank)
        self._positions: dict[tuple[str, ...], tuple[int, int]] = {}

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """None: each rank runs the body by itself."""
        return ()

    def needs_ranks(self) -> None:
        """It is what they have."""

    def index(self, axes: Sequence[str]) -> Tensor:
        """This rank's position along `axes`."""
        index = self.mesh.index(axes, self.place)
        return torch.tensor(index, dtype=torch.int64, device=self.mesh.device)

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs the move here if it is local, else with the other ranks of the axes."""
        if move == "same":
            return x
        local = LOCAL.get(move)
        if local is not None:
            index, num_ranks = self.position(collective.axes)
            return local(collective, x, index, num_ranks)
        return self.communicate(move, collective, x)

    def position(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """This rank's position along `axes`, and how many ranks there are."""
        if torch.compiler.is_compiling():  # Dynamo allows no side effects
            return self.mesh.index(axes, self.place), self.mesh.num_ranks(axes)
        known = self._positions.get(axes)
        if known is None:
            known = self.mesh.index(axes, self.place), self.mesh.num_ranks(axes)
            self._positions[axes] = known
        return known

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a move that needs the other ranks."""
        raise NotImplementedError

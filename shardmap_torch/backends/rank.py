"""RankBackend: base of the backends in which a thread or a process is one rank."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch.backends.local_movements import LOCAL_MOVEMENTS, native_on_one_rank
from shardmap_torch.collectives.operations import Collective, Planned
from shardmap_torch.collectives.protocol import WithoutAutomaticAxes
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.mesh import Mesh


class RankBackend(WithoutAutomaticAxes):
    """Backend of one rank: runs local movements itself; a subclass communicates."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
        """Places `rank` on `mesh`."""
        self.mesh = mesh
        self.rank = rank
        self.place = mesh.coordinates(rank)
        self._positions: dict[tuple[str, ...], tuple[int, int]] = {}

    def plan(self, collective: Collective) -> Planned | None:
        """Returns the plan of a collective over axes of one rank."""
        if torch.compiler.is_compiling() or self.position(collective.axes)[1] > 1:
            return None
        native = native_on_one_rank(collective)
        return None if native is None else Planned(self, collective, lambda _, x: native(x), native)

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """Returns none: each rank runs the body by itself."""
        return ()

    def needs_ranks(self) -> None:
        """Does nothing: each rank runs the body by itself."""

    def index(self, axes: Sequence[str]) -> Tensor:
        """Returns this rank's position along `axes`."""
        index = self.mesh.index(axes, self.place)
        return torch.tensor(index, dtype=torch.int64, device=self.mesh.device)

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a movement here if it is local, else with the other ranks of the axes."""
        if collective.movement.still:
            return x
        local = LOCAL_MOVEMENTS.get(move)
        if local is not None:
            index, num_ranks = self.position(collective.axes)
            return local(collective, x, index, num_ranks)
        return self.communicate(move, collective, x)

    def position(self, axes: tuple[str, ...]) -> tuple[int, int]:
        """Returns this rank's position along `axes`, and the number of ranks."""
        if torch.compiler.is_compiling():  # Dynamo allows no side effects
            return self.mesh.index(axes, self.place), self.mesh.num_ranks(axes)
        known = self._positions.get(axes)
        if known is None:
            known = self.mesh.index(axes, self.place), self.mesh.num_ranks(axes)
            self._positions[axes] = known
        return known

    def rank_along(self, axes: tuple[str, ...]) -> int | None:
        """Returns this rank's position along `axes`."""
        return self.position(axes)[0]

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a movement that needs the other ranks."""
        raise NotImplementedError


def current_rank() -> int:
    """Returns the rank that runs the body on this thread; 0 for all at once, and outside."""
    scope = current_scope()
    backend = None if scope is None else scope.backend
    return backend.rank if isinstance(backend, RankBackend) else 0

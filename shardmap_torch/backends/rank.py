"""RankBackend: base of the backends in which a thread or a process is one rank.

It does the movements that need no communication by itself, as the rank that knows its index.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.backends.reference import REFERENCE, Stack, fill, place
from shardmap_torch.collectives.moves import MOVEMENTS
from shardmap_torch.collectives.operations import Collective, Planned
from shardmap_torch.collectives.protocol import WithoutAutomaticAxes
from shardmap_torch.collectives.scope import current_scope
from shardmap_torch.core.storage import is_spare
from shardmap_torch.mesh import Mesh


def _slice(c: Collective, x: Tensor, index: int, num_ranks: int) -> Tensor:
    if not c.tiled:
        return x.select(c.dim, index)
    if c.sizes is not None:
        own = x.narrow(c.dim, sum(c.sizes[:index]), c.sizes[index])
        return fill(own, c.dim, max(c.sizes))
    length = x.shape[c.dim] // num_ranks
    return x.narrow(c.dim, index * length, length)


def _pad(c: Collective, x: Tensor, index: int, num_ranks: int) -> Tensor:
    return place(x, c.dim, c.tiled, c.sizes, index, num_ranks)


def _mask(c: Collective, x: Tensor, index: int, num_ranks: int) -> Tensor:
    # A copy on that rank too: none of them may share memory with the operand.
    return x.clone() if index == c.source else torch.zeros_like(x)


def _same(c: Collective, x: Tensor, index: int, num_ranks: int) -> Tensor:
    return x


LocalMovement: TypeAlias = Callable[[Collective, Tensor, int, int], Tensor]
"""Moves data from a collective, its operand, this rank's index and the number of ranks."""

# A plain dict, as are the tables of processes: Dynamo gives up on a proxy when any dict changes.
LOCAL_MOVEMENTS: Final[Mapping[str, LocalMovement]] = {
    "slice": _slice,
    "pad": _pad,
    "mask": _mask,
    "same": _same,
}


def on_one_rank(move: str, c: Collective, x: Tensor) -> Tensor:
    """Runs any movement over axes of one rank; the result shares no memory with `x`.

    Most of them are then a copy, in the memory layout that a message would have.
    """
    if _is_copy(move, c):
        return copied(x.detach())
    y = REFERENCE[move](c, Stack(x.detach().unsqueeze(0), True, 1))
    return y.every()[0].clone(memory_format=torch.contiguous_format)


def native_on_one_rank(c: Collective) -> Callable[[Tensor], Tensor] | None:
    """Returns what does the same as a collective over axes of one rank, its derivatives too.

    Both it and its transpose are then copies, or nothing. None where they are more.
    """
    if not (c.keeps_dtype and c.transpose.keeps_dtype):
        return None
    if c.movement.still:
        return _unmoved
    return copied if _is_copy(c.move, c) else None


def _unmoved(x: Tensor) -> Tensor:
    return x


def copied(x: Tensor) -> Tensor:
    """Copies a tensor, unless it is spare, in the memory layout that a message would have."""
    return x if is_spare(x) else x.clone(memory_format=torch.contiguous_format)


def _is_copy(move: str, c: Collective) -> bool:
    return MOVEMENTS[move].copies and c.tiled and c.sizes is None and c.concat_sizes is None


class RankBackend(WithoutAutomaticAxes):
    """Backend of one rank: runs local movements itself; a subclass communicates."""

    def __init__(self, mesh: Mesh, rank: int) -> None:
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

    def index(self, axes: Sequence[str]) -> Tensor:
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
        return self.position(axes)[0]

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a movement that needs the other ranks."""
        raise NotImplementedError


def current_rank() -> int:
    """Returns the rank that runs the body on this thread; 0 for all at once, and outside."""
    scope = current_scope()
    backend = None if scope is None else scope.backend
    return backend.rank if isinstance(backend, RankBackend) else 0

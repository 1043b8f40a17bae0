"""Values of bodies with automatic axes: how they become DTensors over these, and back.

Each step is an operation like a collective, so that every derivative of it is right.
"""

from collections.abc import Callable
from typing import Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardmap_torch.boundary.placements import Placements
from shardmap_torch.collectives.operations import Bind, Linear, Mover, Saved
from shardmap_torch.core.torch_private.dtensor import AsyncCollectiveTensor
from shardmap_torch.mixing.layouts import replicated, settled

Observer = Callable[[str, DTensor, Placements], None]
"""Called with what redistributes a value, the value, and its placements after."""

OBSERVERS: Final[list[Observer]] = []
"""Those who record redistributions; see `redistributions`."""


def moved(x: DTensor, placements: Placements, what: str | None = None) -> DTensor:
    """Redistributes a value, without autograd; observers see it as done for `what`."""
    if x.placements == placements:
        return x
    for observer in OBSERVERS if what is not None else ():
        observer(what or "", x, placements)
    with torch.no_grad():
        return x.redistribute(placements=placements)


def local_of(x: DTensor) -> Tensor:
    """Returns this rank's shard, once it has arrived."""
    local = x._local_tensor
    return local.wait() if isinstance(local, AsyncCollectiveTensor) else local.detach()


class Share(Linear):
    """Operation that makes a DTensor over the automatic axes of this rank's shard."""

    axes: tuple[str, ...] = ()
    move = "share"

    def __init__(self, mesh: DeviceMesh, placements: Placements) -> None:
        """Keeps the placements, none of which is a pending sum."""
        self._mesh, self._placements = mesh, placements

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        return DTensor.from_local(x.detach(), self._mesh, self._placements, run_check=False)

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Takes this rank's shard of the cotangent, placed like the value."""
        return bind(Unshare(self._mesh, self._placements, "gradient"), grad)


class Unshare(Linear):
    """Operation that takes this rank's shard of a DTensor over the automatic axes."""

    axes: tuple[str, ...] = ()
    move = "unshare"

    def __init__(self, mesh: DeviceMesh, placements: Placements, what: str) -> None:
        """Keeps the placements that the value has first to have, none of them a pending sum."""
        self._mesh, self._placements, self._what = mesh, placements, what

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        if not isinstance(x, DTensor):  # equal on all ranks of these axes, as all plain tensors
            x = DTensor.from_local(x, self._mesh, replicated(self._mesh.ndim), run_check=False)
        return local_of(moved(x, self._placements, self._what))

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Wraps this rank's shard of the cotangent."""
        return bind(Share(self._mesh, self._placements), grad)


class Place(Linear):
    """Operation that redistributes a DTensor over the automatic axes, as `mark_sharding` asks."""

    axes: tuple[str, ...] = ()
    move = "place"

    def __init__(self, placements: Placements, what: str = "mark_sharding") -> None:
        """Keeps the placements, none of which is a pending sum."""
        self._placements, self._before, self._what = placements, placements, what

    def run(self, mover: Mover, x: Tensor) -> Tensor:
        assert isinstance(x, DTensor)
        self._before = settled(tuple(x.placements))
        return moved(x, self._placements, self._what)

    def pull_back(self, bind: Bind, grad: Tensor, saved: Saved) -> Tensor:
        """Places the cotangent like the operand."""
        return bind(Place(self._before, self._what), grad)

    def push_forward(self, bind: Bind, tangent: Tensor, saved: Saved) -> Tensor:
        return bind(Place(self._placements, self._what), tangent)

"""Backend of bodies with automatic axes: runs collectives on the shards of DTensors."""

from collections.abc import Callable, Mapping, Sequence
from math import prod
from typing import Any, Final

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.autograd import bind
from shardmap_torch.collectives.moves import MOVEMENTS, untiled_dims
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.dtensors import is_dtensor
from shardmap_torch.core.functorch import base_of
from shardmap_torch.mesh import Mesh
from shardmap_torch.mixing.layouts import replicated, settled
from shardmap_torch.mixing.values import Place, Share, Unshare, local_of, moved
from shardmap_torch.mixing.writes import RedistributedViews

_GRAD: Final = "gradient"
"""The name of redistributions of gradients in reports."""


class SharingBackend(ProcessGroupBackend):
    """This process as one rank, in bodies whose values are sharded over automatic axes.

    A collective over bound axes acts on each shard by itself, which is right as long as it leaves
    the sharded dims alone. A value that is sharded along a dim that the collective splits or joins
    is made global over these axes first, and a pending sum before a maximum.
    """

    # A tree's tensors lie in different ways, and cannot be sent as one message.
    bundles = False

    def __init__(self, mesh: Mesh, axes: tuple[str, ...]) -> None:
        super().__init__(mesh)
        assert mesh.device_mesh is not None  # only process-group meshes come here
        names = mesh.device_mesh.mesh_dim_names or ()
        self.readings = None  # of arguments: they depend on the same
        self.automatic = axes
        self.copies = RedistributedViews()
        self.shared: DeviceMesh = mesh.device_mesh[
            tuple(names[mesh.axis_names.index(axis)] for axis in axes)
        ]

    def plan(self, collective: Collective) -> None:
        """Returns None: a movement depends on how its operand lies."""

    def run(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs a movement on this rank's shard of a DTensor, or on a plain value."""
        if MOVEMENTS[move].still or not isinstance(x, DTensor):
            return super().run(move, collective, x)
        joined, new_dims = _DIMS.get(move, _every)(collective, x.ndim)
        placements = settled(x.placements, joined, linear=not MOVEMENTS[move].extremum)
        x = moved(x, placements, collective.name)
        num_ranks = self.position(collective.axes)[1]
        shape = torch.Size(MOVEMENTS[move].shape(collective, tuple(x.shape), num_ranks))
        local = super().run(move, collective, local_of(x)).contiguous()
        after = tuple(Shard(new_dims[p.dim]) if isinstance(p, Shard) else p for p in placements)
        return DTensor.from_local(
            local, self.shared, after, run_check=False, shape=shape, stride=_strides(shape)
        )

    def replicated(self, x: Tensor) -> Tensor:
        """Makes a plain value of the body a DTensor, differentiably."""
        if is_dtensor(base_of(x)):
            return x
        return bind(self, Share(self.shared, replicated(self.shared.ndim)), x)

    def unshared(self, x: Tensor) -> Tensor:
        """Makes a value of the body plain, and global over the automatic axes, differentiably."""
        if not is_dtensor(base_of(x)):
            return x
        return bind(self, Unshare(self.shared, replicated(self.shared.ndim), "shard_map"), x)

    def place_gradients(
        self, gradients: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Places the gradients of values of the body like these, differentiably."""
        return [self._like(grad, x) for grad, x in zip(gradients, leaves, strict=True)]

    def _like(self, grad: Tensor, x: Tensor) -> Tensor:
        to, of = base_of(x), base_of(grad)
        if not isinstance(to, DTensor) or not isinstance(of, DTensor):
            return grad
        placements = settled(to.placements)
        return grad if of.placements == placements else bind(self, Place(placements, _GRAD), grad)

    def start_gather(self, collective: Collective, x: Tensor) -> Callable[[], Tensor] | None:
        """Returns None for DTensors, which are not gathered ahead of time."""
        return None if isinstance(x, DTensor) else super().start_gather(collective, x)


def _strides(shape: Sequence[int]) -> tuple[int, ...]:
    """Returns the strides of a contiguous tensor."""
    return tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))


Dims = tuple[tuple[int, ...], dict[int, int]]
"""The dims of its operand that a movement splits or joins, and where all the others end up."""


def _kept(c: Collective, ndim: int) -> Dims:
    return (), {dim: dim for dim in range(ndim)}


def _every(c: Collective, ndim: int) -> Dims:
    return tuple(range(ndim)), {}


def _joined(c: Collective, ndim: int) -> Dims:
    if c.tiled:
        return (c.dim,), {dim: dim for dim in range(ndim)}
    return (), {dim: dim + (dim >= c.dim) for dim in range(ndim)}


def _divided(c: Collective, ndim: int) -> Dims:
    if c.tiled:
        return (c.dim,), {dim: dim for dim in range(ndim)}
    return (c.dim,), {dim: dim - (dim > c.dim) for dim in range(ndim)}


def _exchanged(c: Collective, ndim: int) -> Dims:
    if c.tiled:
        return (c.dim, c.concat_dim), {dim: dim for dim in range(ndim)}
    new, split = untiled_dims(c)
    inserted = {dim: dim + (dim >= new) for dim in range(ndim)}
    after = {dim: at - (at > split) for dim, at in inserted.items()}
    return tuple(dim for dim, at in inserted.items() if at == split), after


def _rows(c: Collective, ndim: int) -> Dims:
    return (0,), {dim: dim for dim in range(ndim)}


_DIMS: Final[Mapping[str, Callable[[Any, int], Dims]]] = {
    **dict.fromkeys(("sum", "max", "min", "permute", "broadcast", "sum_mask", "mask"), _kept),
    "gather": _joined,
    "pad": _joined,
    "sum_scatter": _divided,
    "slice": _divided,
    "exchange": _exchanged,
    "ragged": _rows,
}
"""The dims of movements by name; any other movement has global values."""

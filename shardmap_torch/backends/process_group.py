"""Ranks as processes over torch.distributed; the one file that calls its collectives."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Final

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.backends.spmd import RankBackend
from shardmap_torch.backends.stacked import fill, gather, scatter
from shardmap_torch.errors import CommunicationError
from shardmap_torch.mesh import Mesh
from shardmap_torch.rule import Collective

# torch 2.13 renamed both and warns at the old names; 2.11 has only those.
_all_gather_single: Final = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter_single: Final = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)

_WIRE: Final = {
    torch.bool: torch.uint8,
    torch.int16: torch.int32,
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
}
"""Dtypes that travel as another: gloo and NCCL lack some."""


class ProcessGroupBackend(RankBackend):
    """This process as one rank of a mesh."""

    def __init__(self, mesh: Mesh) -> None:
        """Takes this process' rank in the world."""
        super().__init__(mesh, dist.get_rank())
        self._orders: dict[tuple[str, ...], tuple[int, ...]] = {}

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        """Runs the move on the group of the collective's axes.

        Raises:
            CommunicationError: torch.distributed failed, as when a peer is gone.
        """
        try:
            return self._on_wire(move, collective, x)
        except RuntimeError as error:
            raise CommunicationError(
                f"{collective} failed on rank {self.rank} of the {self.mesh}: {error}"
            ) from error

    def _on_wire(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        if x.is_complex():
            # Parts travel as a trailing dim, which no move touches: dims count from the front.
            parts = self._on_wire(move, collective, torch.view_as_real(x.resolve_conj()))
            return torch.view_as_complex(parts.contiguous())
        wire = _WIRE.get(x.dtype)
        if wire is not None:
            return MOVES[move](self, collective, x.to(wire)).to(x.dtype)
        return MOVES[move](self, collective, x)

    def group(self, collective: Collective) -> dist.ProcessGroup:
        """The group along the collective's axes; its ranks stand in mesh order."""
        return self.mesh.group(collective.axes)

    def order(self, axes: tuple[str, ...]) -> tuple[int, ...]:
        """For each position along `axes` (first is major), the group rank that stands there."""
        if axes not in self._orders:
            ranks = self.mesh.peers(axes, self.place)
            in_group = sorted(ranks)
            self._orders[axes] = tuple(in_group.index(rank) for rank in ranks)
        return self._orders[axes]


def _in_order(stacked: Tensor, order: Sequence[int]) -> Tensor:
    """Picks rows; free where the order is that of the group."""
    if list(order) == list(range(len(order))):
        return stacked
    return stacked[list(order)]


def _to_group(order: Sequence[int]) -> list[int]:
    """The inverse permutation: for each group rank, its position along the axes."""
    return [order.index(rank) for rank in range(len(order))]


def _reduce(op: dist.ReduceOp.RedOpType) -> Callable[..., Tensor]:
    def run(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
        # all_reduce works in place, and a body's value is not ours to change.
        y = x.detach().clone(memory_format=torch.contiguous_format)
        dist.all_reduce(y, op, group=backend.group(c))
        return y

    return run


def _all_gather(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    """Every rank's value along a new leading dim, in the order of the axes."""
    order = backend.order(c.axes)
    out = x.new_empty((len(order), *x.shape))
    _all_gather_single(out, x.contiguous().unsqueeze(0), group=backend.group(c))
    return _in_order(out, order)


def _gather(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    return gather(_all_gather(backend, c, x), c.dim, c.tiled, c.sizes)


def _sum_scatter(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    order = backend.order(c.axes)
    parts = _in_order(scatter(x, c.dim, c.tiled, c.sizes, len(order)), _to_group(order))
    out = x.new_empty((1, *parts.shape[1:]))
    _reduce_scatter_single(out, parts.contiguous(), group=backend.group(c))
    return out[0]


def _exchange(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    order = backend.order(c.axes)
    own = backend.mesh.index(c.axes, backend.place)
    if c.tiled and c.concat_sizes is not None:
        # Only the true rows travel on; the receiver knows every rank's true length.
        x = fill(x.narrow(c.concat_dim, 0, c.concat_sizes[own]), c.concat_dim, max(c.concat_sizes))
    parts = scatter(x, c.dim, c.tiled, c.sizes, len(order))
    parts = _in_order(parts, _to_group(order)).contiguous()
    out = torch.empty_like(parts)
    dist.all_to_all_single(out, parts, group=backend.group(c))
    return gather(_in_order(out, order), c.concat_dim, c.tiled, c.concat_sizes)


def _permute(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    group, order = backend.group(c), backend.order(c.axes)
    own = backend.mesh.index(c.axes, backend.place)
    sends = [order[target] for source, target in c.perm if source == own]
    receives = [order[source] for source, target in c.perm if target == own]
    if sends == receives == [order[own]]:
        return x.clone()
    x = x.contiguous()
    out = torch.zeros_like(x) if not receives else torch.empty_like(x)
    # A receive that is posted late doubles the time of an exchange on gloo.
    works = [dist.P2POp(dist.irecv, out, group=group, group_peer=peer) for peer in receives]
    works += [dist.P2POp(dist.isend, x, group=group, group_peer=peer) for peer in sends]
    for work in dist.batch_isend_irecv(works) if works else []:
        work.wait()
    return out


def _broadcast(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    y = x.detach().clone(memory_format=torch.contiguous_format)
    source = backend.order(c.axes)[c.source]
    dist.broadcast(y, group=backend.group(c), group_src=source)
    return y


def _sum_mask(backend: ProcessGroupBackend, c: Collective, x: Tensor) -> Tensor:
    return backend.run("mask", c, MOVES["sum"](backend, c, x))


MOVES: Final[Mapping[str, Callable[[ProcessGroupBackend, Collective, Tensor], Tensor]]] = (
    MappingProxyType(
        {
            "sum": _reduce(dist.ReduceOp.SUM),
            "max": _reduce(dist.ReduceOp.MAX),
            "min": _reduce(dist.ReduceOp.MIN),
            "gather": _gather,
            "sum_scatter": _sum_scatter,
            "exchange": _exchange,
            "permute": _permute,
            "broadcast": _broadcast,
            "sum_mask": _sum_mask,
        }
    )
)

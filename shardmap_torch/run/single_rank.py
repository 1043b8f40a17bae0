"""Runs a call on a simulated mesh of one rank: as plain code, since there is nothing to batch."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch.backends.local_movements import on_one_rank
from shardmap_torch.backends.rank import RankBackend
from shardmap_torch.boundary.call import Call, Untouched, run_body
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.tree import Tree
from shardmap_torch.mesh import Mesh
from shardmap_torch.run.safety.aliasing import apart


class SingleRankBackend(RankBackend):
    """The one rank of a mesh: what it sends comes back to it, as a copy."""

    def __init__(self, mesh: Mesh, device: torch.device | None) -> None:
        """`device` is that of the inputs, for `index`."""
        super().__init__(mesh, 0)
        self._device = device

    def index(self, axes: Sequence[str]) -> Tensor:
        """Returns 0, on the device of the inputs."""
        return torch.zeros((), dtype=torch.int64, device=self._device)

    def communicate(self, move: str, collective: Collective, x: Tensor) -> Tensor:
        return on_one_rank(move, collective, x)


def run(call: Call) -> Tree:
    """Runs the body on the global values, which are the shards of the one rank.

    It gets views of them, so that what it does to a tensor object the caller does not see.
    """
    tensors = [call.leaves[position] for position in call.crossing]
    tensors = [x.view_as(x) for x in tensors]
    backend = SingleRankBackend(call.mesh, tensors[0].device if tensors else call.mesh.device)
    watch = Untouched(call, tensors)
    result = run_body(call, backend, tensors)
    watch.check()
    return result.rebuild(apart(result.crossing, call.leaves))

"""Runtime of simulated meshes: one batched program, one thread per rank, or plain code."""

from typing import Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call, is_checked
from shardmap_torch.collectives.autograd import reject_transforms
from shardmap_torch.core.caching import constant
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.run import single_rank, threads, vmap
from shardmap_torch.run.compiled import give_up
from shardmap_torch.run.recorded.recordings import run_simulated, serves
from shardmap_torch.spec import P

has_data: Final = True


def run(call: Call, batches: bool) -> Tree:
    """Runs a call by the strategy of its mesh.

    Raises:
        TransformError: torch.compile traces it, and it is unchecked, or a transform is active.
    """
    chosen = call.mesh.simulate
    if torch.compiler.is_compiling():
        if not is_checked(call):
            _reject_unchecked(call.name)
        reject_transforms()
        return vmap.run(call)
    if chosen == "ranks" or not (batches or chosen == "vmap"):
        return threads.run(call)
    is_plain = call.mesh.size == 1 and chosen != "vmap"
    batched = single_rank.run if is_plain else vmap.run
    crossing = [call.leaves[position] for position in call.crossing]
    if call.recordings is not None and serves(crossing):
        return run_simulated(call, batched)
    return batched(call)


def place(mesh: Mesh, spec: P, x: Tensor, as_dtensor: bool) -> Tensor:
    """Returns the value: this one process has all of it."""
    return x


# A constant, so that Dynamo calls it: an error raised in traced code loses its text.
@constant
def _reject_unchecked(name: str) -> NoReturn:
    give_up(
        TransformError(
            f"{name}: torch.compile cannot compile an unchecked body on a simulated mesh: torch "
            "drops what one batched program does not have. Check it, compile on a process-group "
            "mesh, or call it uncompiled."
        )
    )

"""Runtime of simulated meshes: one batched program, one thread per rank, or plain code."""

from collections.abc import Sequence
from typing import Final, NoReturn

import torch
from torch import Tensor

from shardmap_torch.backends.rank import RankBackend, on_one_rank
from shardmap_torch.boundary.call import Call, Untouched, is_checked, run_body
from shardmap_torch.collectives.autograd import reject_transforms
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.caching import constant
from shardmap_torch.core.source_location import error_site
from shardmap_torch.core.storage import apart
from shardmap_torch.core.tree import Tree
from shardmap_torch.errors import TransformError
from shardmap_torch.mesh import Mesh
from shardmap_torch.run import threads, vmap
from shardmap_torch.run.compiled import give_up
from shardmap_torch.run.recorded.recordings import run_simulated, serves
from shardmap_torch.spec import P

has_data: Final = True

_UNBATCHED: Final = (
    *("vmap", "atching rule", "Tensor that doesn't have storage", "stack expects each tensor"),
    "to use channels_last",
)
"""In torch's errors where what is batched lacks what a rank has: a number, memory, a rule."""


def run(call: Call) -> Tree:
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
    needs_ranks = chosen == "auto" and call.rank_only is not None
    if chosen == "ranks" or needs_ranks or not is_checked(call):
        return threads.run(call)
    batched = run_alone if call.mesh.size == 1 and chosen != "vmap" else vmap.run
    crossing = [call.leaves[position] for position in call.crossing]
    if call.recordings is not None and serves(crossing):
        return run_simulated(call, batched)
    try:
        return batched(call)
    except RuntimeError as error:
        if chosen == "vmap" and any(sign in str(error) for sign in _UNBATCHED):
            why = f"{str(error).partition('. ')[0]}, at {error_site(error)}."
            raise vmap.rank_only(call.name, why) from error
        if chosen == "vmap" or call.mesh.size > threads.MAX_THREADS:
            raise
    return threads.run(call)  # whether the error is the body's own, or of what is batched


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


def run_alone(call: Call) -> Tree:
    """Runs the body on the global values, which are the shards of the one rank.

    It gets views of them, so that what it does to a tensor object the caller does not see.
    """
    tensors = [call.leaves[position] for position in call.crossing]
    tensors = [x.view_as(x) for x in tensors]
    backend = SingleRankBackend(call.mesh, tensors[0].device if tensors else call.mesh.device)
    watch = Untouched(call, tensors)
    result = run_body(call, backend, tensors)
    watch.check()
    kept = [x for at, x in enumerate(call.leaves) if at not in call.donated]
    return result.rebuild(apart(result.crossing, kept))

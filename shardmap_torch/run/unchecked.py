"""Unchecked calls: on processes their arguments and specs are still compared."""

from collections.abc import Callable

from shardmap_torch.boundary.call import Call
from shardmap_torch.control.start import current
from shardmap_torch.core.tree import Tree
from shardmap_torch.run.agree import agree, describe
from shardmap_torch.run.runtimes import runtime_of
from shardmap_torch.run.safety.guarded import guarded


def run_unchecked(call: Call, run: Callable[[Call, bool], Tree]) -> Tree:
    """Runs a call whose specs give all types.

    Raises:
        CollectiveMismatchError: the other ranks make another call.
    """
    if not runtime_of(call.mesh).is_distributed or current() is None:
        return run(call, False)

    def compared() -> Tree:
        agree(describe(call, None), now=False)
        return run(call, False)

    return guarded(call.mesh, call.name, compared)

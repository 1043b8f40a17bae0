"""Comparing the processes' checked programs before anything is sent.

Processes that run different programs would wait for one another in collectives until a time limit,
and then know nothing about why.
"""

from shardmap_torch.backends.vote import vote
from shardmap_torch.checker.api import Program
from shardmap_torch.errors import ShardMapError


def agree(name: str, depth: float, found: Program | ShardMapError) -> None:
    """Requires that every process has found the same about a call, at the same step.

    Args:
        name: of the function.
        depth: how many steps of the newest call this process has come.
        found: a typed program, or why there is none.

    Raises:
        CollectiveMismatchError: another process has found something else, or waits in a collective;
            shows the first difference of both, on every process.
    """
    if isinstance(found, Program):
        vote(name, depth, f"{name} {found.fingerprint}", found.__str__)
    else:
        vote(name, depth, f"{name} rejected", lambda: f"{name} is rejected: {found}")

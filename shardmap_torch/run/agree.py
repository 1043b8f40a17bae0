"""Comparing the processes' checked programs before anything is sent.

Processes that run different programs would wait for one another in collectives until a time limit,
and then know nothing about why.
"""

from shardmap_torch.backends.consensus import vote
from shardmap_torch.checker.api import Program
from shardmap_torch.checker.guards.replay import Difference
from shardmap_torch.errors import ShardMapError


def agree(name: str, found: Program | Exception, left: Difference | None = None) -> None:
    """Requires that every process has found the same about a call, at the same step.

    Args:
        name: of the function.
        found: a typed program, or why there is none: an error, the checker's or the body's own.
        left: where the newest run has left its program; None before it starts.

    Raises:
        CollectiveMismatchError: another process has found something else, or waits in a collective;
            shows the first difference of both, on every process.
    """
    depth = 0.0 if left is None else left.depth + 1
    if isinstance(found, Program):
        ballot, text = f"{name} {found.fingerprint}", str(found)
    else:
        known = isinstance(found, ShardMapError)
        why = f"is rejected: {found}" if known else f"raises {type(found).__name__}: {found}"
        ballot, text = f"{name} rejected", f"{name} {why}"
    if left is not None:
        text = f"comes to {left.found}, where the program has {left.expected}\n{text}"
    vote(name, depth, ballot, text)

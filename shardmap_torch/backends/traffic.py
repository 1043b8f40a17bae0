"""The one door to other ranks: whatever moves data between them says so here, and is counted.

Processes, threads and batched bodies move data in their own ways; each calls `pass_door` with the
collective and a rank's operand right before. What needs no other rank does not come here.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from fractions import Fraction
from typing import Final

from shardmap_torch.collectives.operations import Collective

TALLIES: Final[list[Counter[str]]] = []
"""Those that count now; empty in most runs."""


def pass_door(collective: Collective, num_bytes: float, num_ranks: int) -> None:
    """Notes that each of `num_ranks` ranks sends an operand of so many bytes."""
    if TALLIES:
        sent = collective.row.sent_by(num_ranks) * Fraction(num_bytes)
        for tally in TALLIES:
            tally[collective.name] += round(sent)


@contextmanager
def counting_bytes() -> Iterator[Counter[str]]:
    """Counts the bytes that a rank sends in this process, by collective, as the table says.

    Of a simulated mesh whose ranks are threads all ranks are counted. Compiled code and the
    overlapped kernels, whose messages are not collectives, are not.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, all_reduce, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated", simulate="vmap")
        >>> total = lambda x: all_reduce(x.sum(), "dp", dst=I)
        >>> f = shard_map(total, mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> with counting_bytes() as sent:
        ...     y = f(torch.arange(8.0))
        >>> sent
        Counter({'all_reduce': 6})
    """
    tally: Counter[str] = Counter()
    TALLIES.append(tally)
    try:
        yield tally
    finally:
        TALLIES.remove(tally)

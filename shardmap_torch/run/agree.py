"""Comparing the ranks' checked programs before the first run, through the store of the processes.

Ranks that run different programs would wait for one another in collectives until a time limit, and
then know nothing about why.
"""

from datetime import timedelta
from itertools import count
from typing import Final

import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d

from shardmap_torch.checker.api import Program
from shardmap_torch.errors import CollectiveMismatchError, ShardMapError

TIME_LIMIT: Final = timedelta(minutes=10)
"""How long a rank waits for the others to check the same call."""

_NUMBERS: Final = count()


def agree(name: str, program: Program | ShardMapError) -> None:
    """Requires that every process has checked the same program at this point.

    Args:
        name: of the function.
        program: what this process has found: a typed program, or why there is none.

    Raises:
        CollectiveMismatchError: another process has another program; shows the first equation of
            both that differs, on every process.
    """
    store, rank = distributed_c10d._get_default_store(), dist.get_rank()
    key = f"shardmap_torch/{next(_NUMBERS)}"
    mine = _print_of(name, program)
    store.set(f"{key}/{rank}", mine)
    if rank == 0:
        prints = [_get(store, f"{key}/{r}", name) for r in range(dist.get_world_size())]
        odd = next((r for r, other in enumerate(prints) if other != prints[0]), 0)
        store.set(f"{key}/odd", str(odd))
    odd = int(_get(store, f"{key}/odd", name))
    if odd == 0:
        return
    if rank in (0, odd):
        store.set(f"{key}/text/{rank}", _text_of(name, program))
    texts = [_get(store, f"{key}/text/{r}", name) for r in (0, odd)]
    raise CollectiveMismatchError(_difference(name, odd, *texts))


def _print_of(name: str, program: Program | ShardMapError) -> str:
    if isinstance(program, Program):
        return f"{name} {program.fingerprint}"
    return f"{name} rejected"


def _text_of(name: str, program: Program | ShardMapError) -> str:
    return str(program) if isinstance(program, Program) else f"{name} is rejected: {program}"


def _get(store: Store, key: str, name: str) -> str:
    try:
        store.wait([key], TIME_LIMIT)
    except dist.DistStoreError as error:
        raise CollectiveMismatchError(
            f"{name}: a process has not checked this call within {TIME_LIMIT}. Every process must "
            "make the same calls of shard_mapped functions, in the same order."
        ) from error
    text: str = store.get(key).decode()
    return text


def _difference(name: str, odd: int, first: str, second: str) -> str:
    """Tells the first lines that differ; where they stand in the source does not count."""
    ours, theirs = first.splitlines(), second.splitlines()
    for mine, other in zip(ours, theirs, strict=False):
        if mine.split("  # ")[0] != other.split("  # ")[0]:
            break
    else:
        shorter = min(len(ours), len(theirs))
        mine, other = ("\n".join(lines[shorter:][:1]) or "  its end" for lines in (ours, theirs))
    return (
        f"{name}: processes run different programs. The first difference:\n"
        f"  rank 0: {mine.strip()}\n"
        f"  rank {odd}: {other.strip()}"
    )

"""Keys of its own for each attempt of a job that torchrun starts again.

The agents of torchrun keep one store for all attempts of a job, and the workers of each meet in it
under the same keys (torch 2.13, `torch.distributed.rendezvous`): one that comes first may find the
address of one that has been killed, and fails or hangs. The number of restarts is no common key,
since the agents of several hosts count each for itself.
"""

import os
import time
import uuid
from datetime import timedelta
from typing import Final

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from shardmap_torch.control.start import within
from shardmap_torch.core.torch_private.engine import Store

AGENT_STORE: Final = "TORCHELASTIC_USE_AGENT_STORE"
"""Set by torchrun's agents to whether they host the store; without it rank 0 makes a new one."""


def init_process_group(backend: str, limit: timedelta | None) -> None:
    """Starts the default group from torchrun's environment, under keys of this attempt.

    Raises:
        CommunicationError: not all ranks have come in time.
    """
    if os.environ.get(AGENT_STORE) != str(True):
        dist.init_process_group(backend, timeout=limit)
        return
    timeout = limit or dist.default_pg_timeout
    store, rank, size = next(rendezvous("env://", timeout=timeout))
    name = within(
        timeout, "Starting the default process group", lambda: meet(store, rank, size, timeout)
    )
    own = dist.PrefixStore(name, store)  # type: ignore[attr-defined]  # torch exports it
    dist.init_process_group(backend, store=own, rank=rank, world_size=size, timeout=limit)


def meet(store: Store, rank: int, size: int, timeout: timedelta) -> str:
    """Returns a name that the ranks of this attempt agree on, and no earlier attempt has had.

    Rank 0 makes the name, and answers requests until each rank has said that it has it. A request
    carries a word of its own, so that no answer to a killed process is taken for one's own.

    Raises:
        RuntimeError: a rank has not come in time.
    """
    if rank > 0:
        return _ask(store, rank)
    name = f"attempt {uuid.uuid4().hex}"
    missing = set(range(1, size))
    end = time.monotonic() + timeout.total_seconds()
    while missing:
        if time.monotonic() > end:
            raise RuntimeError(f"nothing was heard from ranks {sorted(missing)}")
        for other in sorted(missing):
            _answer(store, other, name)
        missing = {other for other in missing if not store.check([f"{name}/{other}"])}
        time.sleep(0.005 * bool(missing))
    return name


def _ask(store: Store, rank: int) -> str:
    word = uuid.uuid4().hex
    store.set(f"attempt of {rank}", word)
    name: str = store.get(f"answer to {word}").decode()
    store.set(f"{name}/{rank}", "")
    return name


def _answer(store: Store, rank: int, name: str) -> None:
    if store.check([f"attempt of {rank}"]):
        store.set(f"answer to {store.get(f'attempt of {rank}').decode()}", name)

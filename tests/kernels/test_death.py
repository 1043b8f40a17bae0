"""A rank that dies in the middle of an exchange is named by the others, in time."""

import os
import re
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import R
from shardmap_torch.errors import KernelError
from shardmap_torch.kernels import (
    all_gather_matmul,
    executor,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from shardmap_torch.kernels.schedule import Chunk
from tests.kernels.support.calls import body
from tests.support.fuzzing import sampled
from tests.support.pool import Gloo, WorkerError

TIMEOUT = 1.5  # Twice that is what the pool waits for the others after a death.
MIDDLE = 3  # The chunk at which rank 1 dies: messages have been sent, and others are missing.


def gather(x: Tensor, w: Tensor) -> Tensor:
    return all_gather_matmul(x, w, "tp", chunks=4, overlap="require")


def scatter(x: Tensor, w: Tensor) -> Tensor:
    return matmul_reduce_scatter(x, w, "tp", chunks=2, overlap="require")


def reduce(x: Tensor, w: Tensor) -> Tensor:
    return matmul_all_reduce(x, w, "tp", dst=R, chunks=2, overlap="require")


def killed_at(count: int, method: Callable[[Any, Chunk], None]) -> Callable[[Any, Chunk], None]:
    """Ends the process when the method is called for the `count`th time."""
    calls = 0

    def multiply(tiles: Any, chunk: Chunk) -> None:
        nonlocal calls
        calls += 1
        if calls == count:
            os._exit(1)
        method(tiles, chunk)

    return multiply


def rank_1_dies(call: Callable[[Tensor, Tensor], Tensor], backward: bool, folder: Path) -> None:
    """Rank 1 dies at a chunk of the second call; the others write what they were told, and when."""
    x, w = torch.ones(24, 3, requires_grad=True), torch.ones(3, 2)
    limit = timedelta(seconds=TIMEOUT)
    with mock.patch("shardmap_torch.mesh.mesh.shortest_timeout", return_value=limit), body():
        call(x, w)  # Connections are up.
        y = call(x, w) if backward else None
        if dist.get_rank() == 1:
            for kind in (executor.Gather, executor.Scatter, executor.Sum):
                mock.patch.object(kind, "multiply", killed_at(MIDDLE, kind.multiply)).start()
        begin = time.monotonic()
        try:
            torch.autograd.backward(y.sum()) if y is not None else call(x, w)
            call(x, w)  # Whoever had all it needed learns it from the next call.
        except KernelError as error:
            taken = time.monotonic() - begin
            (folder / str(dist.get_rank())).write_text(f"{taken:.3f} {error}")


@pytest.mark.sample(3)
@pytest.mark.parametrize("size", sampled((2, 3, 4), 3))
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "backward"])
@pytest.mark.parametrize("call", [gather, scatter, reduce])
def test_the_others_name_axis_step_and_peer_within_the_timeout(
    gloo: Gloo,
    call: Callable[[Tensor, Tensor], Tensor],
    backward: bool,
    size: int,
    tmp_path: Path,
) -> None:
    with pytest.raises(WorkerError, match=f"rank 1 of {size} died with exit code 1"):
        gloo(size).run(rank_1_dies, call, backward, tmp_path)
    survivors = [rank for rank in range(size) if rank != 1]
    told = {rank: (tmp_path / str(rank)).read_text() for rank in survivors}
    pattern = (
        r"([\d.]+) \w+( backward)? over axis 'tp': at step (\d+), rank (\d) "
        r"(?:sends part \d of block \d to|receives part \d of block \d from) rank (\d), "
        r"and the transfer failed: "
    )
    peers = set()
    for rank, text in told.items():
        found = re.match(pattern, text)
        assert found is not None, text
        taken, _, step, who, peer = found.groups()
        assert float(taken) < 2 * TIMEOUT + 1  # Of the call that it died in, or of the next one.
        assert int(step) >= 1
        assert int(who) == rank != int(peer)
        peers.add(int(peer))
    assert 1 in peers  # Those that talk to it name it; the others name who stopped because of it.

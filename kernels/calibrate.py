"""Measures the fabric under a transport: once per group and dtype, at the first call that asks."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmap_torch.kernels.algorithms import gather_forward
from shardmap_torch.kernels.executor import Choice, Gather, complete
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.schedule import Chunk, Message
from shardmap_torch.kernels.transport import Channel, Handle, Transport, run

PROBE_BYTES = 2**20
"""Size of the timed message: large enough that latency does not count, 17 ms at 500 Mbit/s."""

SIDE = 512
"""Rows, inner size and columns of the matmul that is timed: 1 to 3 ms on a CPU core."""

REPEATS = 5

ROUNDS = 8
"""Measurements of the share of overlap; each takes as long as three exchanges."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Tensors to time: a ring exchange of `message`, and the product of `x` with itself."""

    transport: Transport
    message: Tensor
    x: Tensor

    def exchange(self) -> list[Handle]:
        """Starts sending to the next rank and receiving from the previous one."""
        transport = self.transport
        rank, size = transport.rank, transport.num_ranks
        before, after = (rank - 1) % size, (rank + 1) % size
        channel = Channel.open(transport, "calibrate", num_parts=1)
        buffer = torch.empty_like(self.message)
        receive = channel.receive(buffer, Message(before, rank, Chunk(before, 0), 1))
        send = channel.send(self.message, Message(rank, after, Chunk(rank, 0), 1))
        return [receive, send]

    def communicate(self) -> None:
        """Runs one exchange."""
        for handle in self.exchange():
            handle.wait()

    def compute(self, repeats: int = 1) -> None:
        """Runs `repeats` matmuls."""
        for _ in range(repeats):
            torch.mm(self.x, self.x)

    def engine(self) -> None:
        """Runs a kernel with almost nothing to send or multiply: the fixed cost of one."""
        shard, w = self.message[:1].view(1, 1), self.message[:1].view(1, 1)
        choice = Choice("gather/ring", 1)
        run(gather_forward(self.transport, shard, [w], [None], 0, choice))

    def both(self, repeats: int) -> None:
        """Runs matmuls while an exchange is in flight."""
        handles = self.exchange()
        self.compute(repeats)
        for handle in handles:
            handle.wait()

    def share(self, synchronize: Callable[[], None], repeats: int) -> float:
        """Measures the share of an exchange that overlaps matmuls; `synchronize` aligns ranks."""

        def timed(action: Callable[[], None]) -> float:
            synchronize()
            return _once(action)

        transfer = timed(self.communicate)
        compute = timed(lambda: self.compute(repeats))
        together = timed(lambda: self.both(repeats))
        return (compute + transfer - together) / min(compute, transfer)


def _once(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _seconds(action: Callable[[], None]) -> float:
    # Whatever disturbs a run adds to it, connections and caches to the first.
    return min(_once(action) for _ in range(REPEATS))


def _pessimistic(shares: Iterable[float]) -> float:
    """Returns the lower quartile, clipped to 0..1, since shares vary widely on a busy machine."""
    ascending = sorted(shares)
    return min(1.0, max(0.0, ascending[len(ascending) // 4]))


def slowest(transport: Transport, value: float) -> float:
    """Returns the largest value of all ranks, so that all make the same decision."""
    shard = torch.tensor([[value]], dtype=torch.float64)
    choice = Choice("gather/ring", 1)
    gather = Gather(transport, "calibrate", shard, lambda rows, tile: None, choice)
    return float(run(complete(gather)).max())


def measure(transport: Transport, dtype: torch.dtype) -> Fabric:
    """Times messages, matmuls, an empty kernel, and messages under matmuls.

    Every rank of the transport must call it; it takes 0.1 to 0.5 s. The last figure is the one that
    a data sheet does not have: how much of a transfer proceeds while this rank computes. Where the
    same cores do both it is near 0, and no schedule can gain anything. It is estimated low, from
    runs in direct succession, since overlap without gain costs up to 1.7 times the CPU seconds on
    loopback.
    """

    def agree(action: Callable[[], None]) -> float:
        return slowest(transport, _seconds(action))

    x = torch.ones(SIDE, SIDE, dtype=dtype)
    word = _Probe(transport, torch.zeros(1), x)
    probe = _Probe(transport, torch.zeros(PROBE_BYTES // 4), x)
    latency, travel, product = (
        agree(word.communicate),
        agree(probe.communicate),
        agree(word.compute),
    )
    num_ranks = transport.num_ranks
    launch = (agree(word.engine) - (num_ranks - 1) * latency) / num_ranks
    repeats = max(1, round(travel / product))
    share = _pessimistic(probe.share(word.communicate, repeats) for _ in range(ROUNDS))
    return Fabric(
        latency=latency,
        bandwidth=PROBE_BYTES / max(travel - latency, travel / 2),  # Noise apart, latency is less.
        flops=2.0 * SIDE**3 / product,
        launch=max(0.0, launch),
        overlap=-slowest(transport, -share),
    )

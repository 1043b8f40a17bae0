"""Measures the fabric under a transport: once per group and dtype, at the first call that asks."""

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor

from shardmap_torch.kernels.algorithms import gather_forward
from shardmap_torch.kernels.planning.cost import Fabric
from shardmap_torch.kernels.planning.schedule import Chunk, Message
from shardmap_torch.kernels.transports.executor import Choice, Gather
from shardmap_torch.kernels.transports.protocol import Channel, Handle, Steps, Transport, run

PROBE_BYTES = 2**20
"""Long enough that latency does not count, 17 ms at 500 Mbit/s."""

SIDE = 512
"""Rows, inner size and columns of the matmul that is timed: 1 to 3 ms on a CPU core."""

REPEATS = 5

ROUNDS = 8
"""Of the share of overlap, each as long as three exchanges."""


@dataclass(frozen=True, slots=True)
class _Probe:
    """Tensors to time: a ring exchange of `message`, and the product of `x` with itself."""

    transport: Transport
    message: Tensor
    x: Tensor

    def exchange(self) -> list[Handle]:
        """Sends to the next rank and receives from the previous one."""
        transport = self.transport
        rank, size = transport.rank, transport.num_ranks
        before, after = (rank - 1) % size, (rank + 1) % size
        channel = Channel.open(transport, "calibrate", num_parts=1)
        buffer = torch.empty_like(self.message)
        receive = channel.receive(buffer, Message(before, rank, Chunk(before, 0), 1))
        send = channel.send(self.message, Message(rank, after, Chunk(rank, 0), 1))
        return [receive, send]

    def communicate(self) -> None:
        """One exchange."""
        for handle in self.exchange():
            handle.wait()

    def compute(self, repeats: int = 1) -> None:
        """Matmuls in a row."""
        for _ in range(repeats):
            torch.mm(self.x, self.x)

    def engine(self) -> None:
        """A kernel with next to nothing to send or multiply: what running it costs."""
        shard, w = self.message[:1].view(1, 1), self.message[:1].view(1, 1)
        choice = Choice("gather/ring", 1)
        run(gather_forward(self.transport, shard, [w], [None], 0, choice))

    def both(self, repeats: int) -> None:
        """Matmuls while an exchange is on its way."""
        handles = self.exchange()
        self.compute(repeats)
        for handle in handles:
            handle.wait()

    def share(self, meet: Callable[[], None], repeats: int) -> float:
        """Measures the share of an exchange that ran under matmuls; ranks `meet` before each."""

        def timed(action: Callable[[], None]) -> float:
            meet()
            return _once(action)

        travel = timed(self.communicate)
        work = timed(lambda: self.compute(repeats))
        together = timed(lambda: self.both(repeats))
        return (work + travel - together) / min(work, travel)


def _once(action: Callable[[], None]) -> float:
    begin = time.perf_counter()
    action()
    return time.perf_counter() - begin


def _seconds(action: Callable[[], None]) -> float:
    # Whatever disturbs a run adds to it, connections and caches to the first.
    return min(_once(action) for _ in range(REPEATS))


def _doubtful(shares: Iterable[float]) -> float:
    """The lower quartile, from 0 to 1: on a busy machine shares scatter, and overlap must wait."""
    ordered = sorted(shares)
    return min(1.0, max(0.0, ordered[len(ordered) // 4]))


def slowest(transport: Transport, value: float) -> float:
    """The largest value of any rank: all ranks must decide alike."""
    shard = torch.tensor([[value]], dtype=torch.float64)
    choice = Choice("gather/ring", 1)
    gather = Gather(transport, "calibrate", shard, lambda rows, tile: None, choice)

    def steps() -> Steps[Tensor]:
        yield from gather.start()
        return (yield from gather.finish())

    return float(run(steps()).max())


def measure(transport: Transport, dtype: torch.dtype) -> Fabric:
    """Times messages, matmuls, an empty kernel, and messages under matmuls.

    Every rank of the transport must call it; it takes 0.1 to 0.5 s. The last figure is the one that
    a data sheet does not have: how much of a transfer proceeds while this rank computes. Where the
    same cores do both it is near 0, and no schedule can gain anything. It is taken from pieces that
    follow one another at once, and on the safe side: who overlaps in vain pays for it, up to 1.7
    times in CPU seconds on loopback.
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
    share = _doubtful(probe.share(word.communicate, repeats) for _ in range(ROUNDS))
    return Fabric(
        latency=latency,
        bandwidth=PROBE_BYTES / max(travel - latency, travel / 2),  # Noise apart, latency is less.
        flops=2.0 * SIDE**3 / product,
        launch=max(0.0, launch),
        overlap=-slowest(transport, -share),
    )

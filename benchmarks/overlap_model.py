"""The paper model of docs/overlap.md: the kernels on the virtual clock of machines not at hand.

    .venv/bin/python -m benchmarks.overlap_model

Nothing is measured here. The kernels run on tensors without data; the clock is told bandwidths
and rates that the document gives sources for.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor

from shardmap_torch.kernels.algorithms import gather_backward, gather_forward, scatter_forward
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.transport import Steps, Transport
from tests.kernels.support.virtual_network import VirtualNetwork

# 989 Tflop/s dense bfloat16 and 4.8 TB/s by data sheet, 70 % and 80 % of them in practice, and 2 us
# between kernels.
H200 = {"flops": 0.7 * 989e12, "memory": 0.8 * 4.8e12, "launch": 2e-6}
MACHINES = {
    # 450 GB/s each way by data sheet, 80 % of it; 5 us for an event and the start of a copy.
    "8 ranks, NVLink": (8, Fabric(latency=5e-6, bandwidth=0.8 * 450e9, **H200)),
    # One 400 Gbit/s adapter a GPU, 90 % of it. In a ring over both nodes every hop waits for the
    # slowest, so 16 ranks have the same link as 2.
    "2 ranks, InfiniBand": (2, Fabric(latency=1e-5, bandwidth=0.9 * 50e9, **H200)),
    "16 ranks, InfiniBand": (16, Fabric(latency=1e-5, bandwidth=0.9 * 50e9, **H200)),
}


@dataclass(frozen=True)
class Layer:
    """A gated MLP: hidden -> 2 * inner -> hidden, over `tokens` tokens of the whole group."""

    hidden: int
    inner: int
    tokens: int


LAYERS = {
    "70B, 8k tokens": Layer(8192, 28672, 8192),
    "8B, 8k tokens": Layer(4096, 14336, 8192),
    "8B, 1k tokens": Layer(4096, 14336, 1024),
}


def meta(*shape: int) -> Tensor:
    return torch.empty(*shape, dtype=torch.bfloat16, device="meta")


def column(layer: Layer, t: Transport, choice: Choice) -> Steps[object]:
    """Gate and up projection from sequence-sharded activations."""
    ws = [meta(layer.hidden, layer.inner // t.num_ranks) for _ in range(2)]
    x = meta(layer.tokens // t.num_ranks, layer.hidden)
    return gather_forward(t, x, ws, [None, None], 0, choice)


def row(layer: Layer, t: Transport, choice: Choice) -> Steps[object]:
    """Down projection back to sequence shards."""
    inner = layer.inner // t.num_ranks
    return scatter_forward(t, meta(layer.tokens, inner), meta(inner, layer.hidden), 0, choice)


def column_backward(layer: Layer, t: Transport, choice: Choice) -> Steps[object]:
    """Both gradients of the gate and up projection."""
    inner = layer.inner // t.num_ranks
    ws, dys = ([meta(*s) for _ in range(2)] for s in ((layer.hidden, inner), (layer.tokens, inner)))
    gathered = meta(layer.tokens, layer.hidden)
    x = meta(layer.tokens // t.num_ranks, layer.hidden)
    return gather_backward(t, x, gathered, ws, dys, [True, True], 0, choice, choice)


Timed = tuple[float, int]
Kernel = Callable[[Layer, Transport, Choice], Steps[object]]
KERNELS: dict[
    str, tuple[Kernel, str, int]
] = {  # Kernel, schedule, matmuls of the row layer's size.
    "all_gather_matmul": (column, "gather/ring", 2),
    "matmul_reduce_scatter": (row, "scatter/direct", 1),
    "column backward": (column_backward, "scatter/direct", 4),
}


def seconds(kernel: Kernel, layer: Layer, ranks: int, fabric: Fabric, choice: Choice) -> float:
    network = VirtualNetwork(ranks, fabric)
    network.run(lambda transport: kernel(layer, transport, choice))
    return network.seconds


def fastest(kernel: Kernel, layer: Layer, ranks: int, fabric: Fabric, schedule: str) -> Timed:
    """The best number of parts and its time."""
    return min(
        (seconds(kernel, layer, ranks, fabric, Choice(schedule, parts)), parts)
        for parts in (1, 2, 4, 8)
    )


def rows() -> Iterator[str]:
    yield "| machine | layer | kernel | compute | comm | parts | overlapped | hidden | gain |"
    yield "|---|---|---|---|---|---|---|---|---|"
    for (machine, (ranks, fabric)), (name, layer) in product(MACHINES.items(), LAYERS.items()):
        # What the same messages take when computing takes no time: latencies overlap there too.
        only_link = Fabric(fabric.latency, fabric.bandwidth, flops=float("inf"))
        for op, (kernel, schedule, matmuls) in KERNELS.items():
            flops = 2.0 * layer.tokens * layer.hidden * layer.inner / ranks
            compute = matmuls * fabric.compute(flops, 0)
            comm, _ = fastest(kernel, layer, ranks, only_link, schedule)
            best, parts = fastest(kernel, layer, ranks, fabric, schedule)
            hidden = (compute + comm - best) / min(compute, comm)
            yield (
                f"| {machine} | {name} | {op} | {compute * 1e6:.0f} us | {comm * 1e6:.0f} us "
                f"| {parts} | {best * 1e6:.0f} us | {hidden:.0%} | {(compute + comm) / best:.2f}x |"
            )


if __name__ == "__main__":
    print("\n".join(rows()))

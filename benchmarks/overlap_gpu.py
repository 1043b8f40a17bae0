"""Overlap on GPUs: what chunks cost the matmul, and how much of the communication hides.

    .venv/bin/python -m benchmarks.overlap_gpu                    # one GPU, peers played by copies
    torchrun --nproc-per-node 8 -m benchmarks.overlap_gpu         # NCCL

Where one GPU is alone, it plays rank 0 of 8: what would come from a peer is copied from pinned
memory of the host, what would go to one is copied there, by the copy engines and on the stream that
NCCL would have. The kernel's code is the same; the link is PCIe. This has never run: whoever has a
GPU is the first.
"""

import os
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.kernels.algorithms import gather_forward, scatter_forward
from shardmap_torch.kernels.executor import Choice, Gather, complete
from shardmap_torch.kernels.lanes import CudaLanes
from shardmap_torch.kernels.transport import NcclTransport, Work, run

ROUNDS, WARM_UP = 20, 5
ROWS, INNER, COLUMNS = 1024, 8192, 7168  # A rank's block, and the layer of a 70B model on 8 ranks.
PARTS = (1, 2, 4, 8)


class Done:
    """A copy on the current stream, behind which that stream is anyway."""

    def wait(self) -> None:
        pass


def played(device: torch.device, num_ranks: int) -> NcclTransport:
    """Rank 0 of `num_ranks` whose peers are pinned memory."""
    buffers: dict[tuple[str, torch.Size], Tensor] = {}

    def on_host(use: str, like: Tensor) -> Tensor:
        key = (use, like.shape)
        if key not in buffers:
            buffers[key] = torch.zeros(like.shape, dtype=like.dtype, pin_memory=True)
        return buffers[key]

    def permute(sent: Tensor, target: int, received: Tensor, source: int) -> list[Work]:
        received.copy_(on_host("in", received), non_blocking=True)
        on_host("out", sent).copy_(sent, non_blocking=True)
        return [Done()]

    return NcclTransport(0, num_ranks, "tp", CudaLanes(device), permute)


@contextmanager
def transport_of(device: torch.device) -> Iterator[NcclTransport]:
    """NCCL between the processes of torchrun, or a GPU by itself."""
    if "RANK" not in os.environ:
        yield played(device, num_ranks=8)
        return
    dist.init_process_group("nccl", device_id=device)
    try:
        group = dist.group.WORLD
        assert group is not None
        yield NcclTransport.over(group, "tp", CudaLanes(device))
    finally:
        dist.destroy_process_group()


def milliseconds(action: Callable[[], object]) -> float:
    """Median time on the GPU, from a stream that is idle to one that is idle again."""
    times: list[float] = []
    for _ in range(WARM_UP + ROUNDS):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        action()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times[WARM_UP:])


@dataclass(frozen=True)
class Layer:
    """A column and the row layer that mirrors it, on one of `t.num_ranks` ranks."""

    t: NcclTransport
    shard: Tensor
    whole: Tensor
    w: Tensor

    @classmethod
    def make(cls, t: NcclTransport, device: torch.device) -> "Layer":
        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, device=device, dtype=torch.bfloat16)

        return cls(
            t, normal(ROWS, INNER), normal(t.num_ranks * ROWS, INNER), normal(INNER, COLUMNS)
        )

    def multiply(self, chunks: int = 1) -> None:
        """The whole product, in chunks of equal size."""
        for rows in self.whole.chunk(chunks):
            torch.mm(rows, self.w)

    def exchange(self, columns: int) -> None:
        """The messages alone: a block of so many columns to or through every other rank."""
        shard = self.whole.new_empty(ROWS, columns)
        choice = Choice("gather/ring", 1)
        run(complete(Gather(self.t, "exchange", shard, lambda rows, tile: None, choice)))

    def gather(self, parts: int) -> None:
        choice = Choice("gather/ring", parts)
        run(gather_forward(self.t, self.shard, [self.w], [None], 0, choice))

    def scatter(self, parts: int) -> None:
        run(scatter_forward(self.t, self.whole, self.w, 0, Choice("scatter/direct", parts)))


def report_efficiency(layer: Layer, say: Callable[[str], None]) -> float:
    """Prints the time that the matmul alone loses to being divided into chunks."""
    whole = milliseconds(layer.multiply)
    rows, n = layer.whole.shape[0], layer.t.num_ranks
    say(f"matmul {rows} x {INNER} x {COLUMNS}, bfloat16: {whole:.3f} ms in one chunk")
    for chunks in (n * parts for parts in PARTS):
        chunked = milliseconds(partial(layer.multiply, chunks))
        share = whole / chunked
        say(f"  {chunks:3d} chunks of {rows // chunks:5d} rows: {chunked:.3f} ms, {share:.0%}")
    return whole


def report_hidden(layer: Layer, compute: float, say: Callable[[str], None]) -> None:
    """T_comm, T_overlap and the hidden fraction, for each number of parts."""
    kernels = {
        "all_gather_matmul": (INNER, layer.gather),
        "matmul_reduce_scatter": (COLUMNS, layer.scatter),
    }
    for name, (columns, kernel) in kernels.items():
        comm = milliseconds(partial(layer.exchange, columns))
        say(f"{name}: compute {compute:.3f} ms, communication {comm:.3f} ms")
        for parts in PARTS:
            taken = milliseconds(partial(kernel, parts))
            hidden = (comm + compute - taken) / min(comm, compute)
            gain = (comm + compute) / taken
            say(f"  {parts} parts: {taken:.3f} ms, {hidden:.0%} hidden, {gain:.2f}x")


def main() -> None:
    if not torch.cuda.is_available():
        print("There is no GPU here: nothing is measured, and nothing is known of overlap on one.")
        return
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    with transport_of(device) as transport:

        def say(line: str) -> None:
            if transport.rank == 0:
                print(line, flush=True)

        link = "NCCL" if dist.is_initialized() else "copies to and from the host"
        say(f"{transport.num_ranks} ranks, {link}, {torch.cuda.get_device_name(device)}")
        layer = Layer.make(transport, device)
        report_hidden(layer, report_efficiency(layer, say), say)


if __name__ == "__main__":
    main()

"""Contestants of `benchmarks/overlap.py`: overlapped, unoverlapped, and as the toy does it.

All are kernels over a `Transport` and so run on two real ranks and on the virtual clock alike,
except those that call gloo's own collectives. Two ranks.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.kernels.algorithms import (
    gather_backward,
    gather_forward,
    multiply,
    product_backward,
    scatter_forward,
)
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.schedule import Chunk, Message, split
from shardmap_torch.kernels.transport import Channel, Handle, Steps, Transport

Kernel: TypeAlias = Callable[[Transport], Steps[Any]]

# Roles: what a variant's time means in the table.
COMPUTE, COMM, UNFUSED, OVERLAP, TOY, PARTLY = (
    "compute",
    "comm",
    "unfused",
    "overlap",
    "toy",
    "partly",
)


@dataclass(frozen=True)
class Variant:
    """A way to run (a chunk of) an operation; `real_only` where it needs a process group."""

    role: str
    kernel: Kernel
    real_only: bool = False


@dataclass(frozen=True)
class Setting:
    """A column layer [rows, inner] @ [inner, columns]; the row layer is its mirror image."""

    rows: int
    inner: int
    columns: int
    parts: int
    backward_parts: int
    device: str = "cpu"

    def tensor(self, *shape: int) -> Tensor:
        return torch.rand(*shape, device=self.device)


def exchange(
    transport: Transport, outgoing: Tensor, incoming: Tensor, part: int = 0, parts: int = 1
) -> Iterator[Handle]:
    """Swaps tensors with the other rank, receive posted first."""
    rank, peer = transport.rank, 1 - transport.rank
    channel = Channel.open(transport, "exchange", parts)
    receive = channel.receive(incoming, Message(peer, rank, Chunk(peer, part), 1))
    send = channel.send(outgoing, Message(rank, peer, Chunk(rank, part), 1))
    yield from (receive, send)


def own_and_peer(transport: Transport, x: Tensor) -> tuple[Tensor, Tensor]:
    """The halves of `x` that belong to this rank and to the other."""
    half = x.shape[0] // 2
    halves = x[:half], x[half:]
    return halves[transport.rank], halves[1 - transport.rank]


def gather_variants(s: Setting) -> Mapping[str, Variant]:
    half = s.rows // 2
    x, w, full = s.tensor(half, s.inner), s.tensor(s.inner, s.columns), s.tensor(s.rows, s.inner)
    choice = Choice("gather/ring", s.parts)

    def compute(transport: Transport) -> Steps[None]:
        multiply(transport, full, w)
        yield from ()

    def comm(transport: Transport) -> Steps[None]:
        yield from exchange(transport, x, own_and_peer(transport, full)[1])

    def exchange_then_matmul(transport: Transport) -> Steps[None]:
        own, peer = own_and_peer(transport, full)
        own.copy_(x)
        yield from exchange(transport, x, peer)
        multiply(transport, full, w)

    def collective_then_matmul(transport: Transport) -> Steps[None]:
        dist.all_gather_into_tensor(full, x)
        multiply(transport, full, w)
        yield from ()

    def toy(transport: Transport) -> Steps[None]:
        """The order of events in tensor_parallel_toy: matmul, exchange, matmul."""
        peer = own_and_peer(transport, full)[1]
        multiply(transport, x, w)
        yield from exchange(transport, x, peer)
        multiply(transport, peer, w)

    return {
        "matmul": Variant(COMPUTE, compute),
        "exchange": Variant(COMM, comm),
        "exchange, matmul": Variant(UNFUSED, exchange_then_matmul),
        "gloo all_gather, matmul": Variant(UNFUSED, collective_then_matmul, real_only=True),
        "toy: matmul, exchange, matmul": Variant(TOY, toy),
        "all_gather_matmul": Variant(
            OVERLAP, lambda transport: gather_forward(transport, x, [w], [None], 0, choice)
        ),
    }


def scatter_variants(s: Setting) -> Mapping[str, Variant]:
    half = s.rows // 2
    x, w = s.tensor(s.rows, s.columns), s.tensor(s.columns, s.inner)
    addend = s.tensor(half, s.inner)
    choice = Choice("scatter/direct", s.parts)

    def compute(transport: Transport) -> Steps[None]:
        multiply(transport, x, w)
        yield from ()

    def reduce(transport: Transport, y: Tensor) -> Steps[None]:
        own, peer = own_and_peer(transport, y)
        yield from exchange(transport, peer, addend)
        own += addend

    def comm(transport: Transport) -> Steps[None]:
        yield from exchange(transport, s.tensor(half, s.inner), addend)

    def matmul_then_exchange(transport: Transport) -> Steps[None]:
        yield from reduce(transport, multiply(transport, x, w))

    def matmul_then_collective(transport: Transport) -> Steps[None]:
        dist.reduce_scatter_tensor(addend, multiply(transport, x, w))
        yield from ()

    def toy(transport: Transport) -> Steps[None]:
        """Chunked matmul with a blocking reduction per chunk."""
        own, peer = own_and_peer(transport, x)
        for rows in split(half, s.parts):
            outgoing = multiply(transport, peer[rows], w)
            yield from exchange(transport, outgoing, addend[rows])
            kept = multiply(transport, own[rows], w)
            kept += addend[rows]

    return {
        "matmul": Variant(COMPUTE, compute),
        "exchange": Variant(COMM, comm),
        "matmul, exchange, add": Variant(UNFUSED, matmul_then_exchange),
        "matmul, gloo reduce_scatter": Variant(UNFUSED, matmul_then_collective, real_only=True),
        "toy: a reduction per chunk": Variant(TOY, toy),
        "matmul_reduce_scatter": Variant(
            OVERLAP, lambda transport: scatter_forward(transport, x, w, 0, choice)
        ),
    }


def column_backward_variants(s: Setting) -> Mapping[str, Variant]:
    """Backward of all_gather_matmul, with the gathered x saved or gathered again."""
    half = s.rows // 2
    shard, gathered = s.tensor(half, s.inner), s.tensor(s.rows, s.inner)
    w, dy = s.tensor(s.inner, s.columns), s.tensor(s.rows, s.columns)
    addend = s.tensor(half, s.inner)
    choice = Choice("scatter/direct", s.backward_parts)
    gather = Choice("gather/ring", s.backward_parts)

    def dx(transport: Transport) -> tuple[Tensor, Tensor]:
        """The input gradient before its reduction."""
        return own_and_peer(transport, multiply(transport, dy, w.t()))

    def dw(transport: Transport) -> None:
        multiply(transport, gathered.t(), dy)

    def compute(transport: Transport) -> Steps[None]:
        dx(transport)
        dw(transport)
        yield from ()

    def comm(transport: Transport) -> Steps[None]:
        yield from exchange(transport, shard, addend)

    def one_after_another(transport: Transport) -> Steps[None]:
        own, peer = dx(transport)
        yield from exchange(transport, peer, addend)
        own += addend
        dw(transport)

    def under_the_weight_gradient(transport: Transport) -> Steps[None]:
        own, peer = dx(transport)
        handles = list(_issue(transport, peer, addend))
        dw(transport)
        yield from handles
        own += addend

    def pipelined_only(transport: Transport) -> Steps[None]:
        yield from scatter_forward(transport, dy, w.t(), 0, choice)
        dw(transport)

    def overlapped(transport: Transport) -> Steps[Any]:
        return gather_backward(transport, shard, gathered, [w], [dy], [True], 0, choice, gather)

    def again(transport: Transport) -> Steps[Any]:
        return gather_backward(transport, shard, None, [w], [dy], [True], 0, choice, gather)

    return {
        "two matmuls": Variant(COMPUTE, compute),
        "exchange": Variant(COMM, comm),
        "dx, exchange, dw": Variant(UNFUSED, one_after_another),
        "exchange under dw only": Variant(PARTLY, under_the_weight_gradient),
        "pipelined in dx only": Variant(PARTLY, pipelined_only),
        "x gathered again (2 exchanges)": Variant(PARTLY, again),
        "pipelined in dx, finished after dw": Variant(OVERLAP, overlapped),
    }


def _issue(transport: Transport, outgoing: Tensor, incoming: Tensor) -> list[Handle]:
    """Starts an exchange without waiting for it."""
    return list(exchange(transport, outgoing, incoming))


def row_backward_variants(s: Setting) -> Mapping[str, Variant]:
    """Backward of matmul_reduce_scatter: one gather of dy feeds both gradients."""
    half = s.rows // 2
    x, w = s.tensor(s.rows, s.columns), s.tensor(s.columns, s.inner)
    dy, full = s.tensor(half, s.inner), s.tensor(s.rows, s.inner)
    choice = Choice("gather/ring", s.backward_parts)

    def gradients(transport: Transport) -> None:
        multiply(transport, full, w.t())
        multiply(transport, x.t(), full)

    def compute(transport: Transport) -> Steps[None]:
        gradients(transport)
        yield from ()

    def comm(transport: Transport) -> Steps[None]:
        yield from exchange(transport, dy, full[half:])

    def one_after_another(transport: Transport) -> Steps[None]:
        full[:half].copy_(dy)
        yield from exchange(transport, dy, full[half:])
        gradients(transport)

    return {
        "two matmuls": Variant(COMPUTE, compute),
        "exchange": Variant(COMM, comm),
        "exchange, dx, dw": Variant(UNFUSED, one_after_another),
        "gather feeds dx and dw": Variant(
            OVERLAP,
            lambda transport: product_backward(transport, x, w, dy, (True, True), 0, choice),
        ),
    }


OPERATIONS: Mapping[str, Callable[[Setting], Mapping[str, Variant]]] = {
    "all_gather_matmul": gather_variants,
    "matmul_reduce_scatter": scatter_variants,
    "column layer backward": column_backward_variants,
    "row layer backward": row_backward_variants,
}

"""Messages that travel with their mates: every schedule has them, in one order on all ranks."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.algorithms import gather_forward, reduce_forward, scatter_forward
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.lanes import HOST_LANES
from shardmap_torch.kernels.schedule import SCHEDULES, Await, Chunk, Message, Program, Send
from shardmap_torch.kernels.transport import (
    Channel,
    GlooTransport,
    NcclTransport,
    Permute,
    Transport,
    run,
)
from tests.support.golden import told
from tests.support.pool import Gloo

Kind = tuple[int, int, int]


def kind(message: Message, num_ranks: int) -> Kind:
    return (message.target - message.source) % num_ranks, message.step, message.chunk.part


def sent_and_awaited(program: Program, num_ranks: int) -> tuple[list[Kind], list[Kind]]:
    """Kinds in order; each arrival must have been preceded by the send that it travels with."""
    sent: list[Kind] = []
    awaited: list[Kind] = []
    for instruction in program.instructions:
        match instruction:
            case Send(message):
                sent.append(kind(message, num_ranks))
            case Await(message):
                awaited.append(kind(message, num_ranks))
                assert awaited[-1] in sent, message
    return sent, awaited


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_all_ranks_send_in_one_order_and_each_message_has_its_mate(schedule: str) -> None:
    for num_ranks in range(1, 17):
        for parts in (1, 2, 5):
            programs = [SCHEDULES[schedule](rank, num_ranks, parts) for rank in range(num_ranks)]
            found = [sent_and_awaited(program, num_ranks) for program in programs]
            first, _ = found[0]
            assert len(set(first)) == len(first)
            for sent, awaited in found:
                assert sent == first
                assert sorted(awaited) == sorted(sent)


def differences(num_ranks: int) -> list[float]:
    """Kernels over `batch_isend_irecv` against those over gloo's own sends and receives."""
    rank = dist.get_rank()
    generator = torch.Generator().manual_seed(rank)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x, w = normal(6, 4), normal(4, 3)
    long, tall = normal(6 * num_ranks, 4), normal(5 * num_ranks + 1, 4)
    group = dist.new_group()
    assert isinstance(group, dist.ProcessGroup)
    results = []
    for transport in (GlooTransport(group, "tp"), NcclTransport.over(group, "tp", HOST_LANES)):
        t: Transport = transport
        outs, _ = run(gather_forward(t, x, [w], [None], 0, Choice("gather/ring", 2)))
        results.append(
            [
                *outs,
                run(gather_forward(t, x, [w], [None], 0, Choice("gather/ring", 1)))[0][0],
                run(scatter_forward(t, long, w, 0, Choice("scatter/direct", 2))),
                run(scatter_forward(t, long, w, 0, Choice("scatter/direct", 3))),
                run(reduce_forward(t, tall, w, Choice("reduce/direct", 2))),
            ]
        )
    return [float((a - b).abs().max()) for a, b in zip(*results, strict=True)]


@pytest.mark.parametrize("size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_batches_of_torch_distributed_carry_what_single_messages_do(gloo: Gloo, size: int) -> None:
    for found in gloo(size).run(differences, size):
        assert found == [0.0] * 5


def never(sent: Tensor, target: int, received: Tensor, source: int) -> Any:
    raise RuntimeError("NCCL has failed")


def channel(permute: Permute = never) -> Channel:
    transport = NcclTransport(0, 3, "tp", HOST_LANES, permute)
    return Channel.open(transport, "all_gather_matmul", num_parts=1)


OUT = Message(source=0, target=1, chunk=Chunk(0, 0), step=1)
IN = Message(source=2, target=0, chunk=Chunk(2, 0), step=1)
AT = "all_gather_matmul over axis 'tp': at step 1, rank 0 "


def test_a_message_awaited_before_its_mate_is_sent_is_an_error_not_a_hang() -> None:
    with told(KernelError):
        channel().receive(torch.zeros(1), IN).wait()


@pytest.mark.parametrize(
    "other",
    [
        pytest.param(Message(1, 0, Chunk(1, 0), step=1), id="from the other side"),
        pytest.param(Message(2, 0, Chunk(2, 0), step=2), id="at another step"),
    ],
)
def test_a_message_without_a_mate_is_an_error_not_a_hang(other: Message) -> None:
    opened = channel()
    opened.receive(torch.zeros(1), other)
    with told(KernelError):
        opened.send(torch.zeros(1), OUT)


def test_a_failure_names_axis_step_and_peer() -> None:
    opened = channel()
    opened.receive(torch.zeros(1), IN)
    with told(KernelError):
        opened.send(torch.zeros(1), OUT)

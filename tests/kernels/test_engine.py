"""The kernels on the virtual network: exact results, bytes, predicted times, caught mistakes."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.algorithms import (
    gather_backward,
    gather_forward,
    product_backward,
    reduce_forward,
    scatter_forward,
)
from shardmap_torch.kernels.executor import Choice, Gather
from shardmap_torch.kernels.planner import Fabric
from shardmap_torch.kernels.schedule import Chunk, Message
from shardmap_torch.kernels.transport import Channel, Steps, Transport
from tests.kernels.support.virtual_network import VirtualNetwork, VirtualTransport
from tests.support.fuzzing import sampled
from tests.support.golden import told

INSTANT = Fabric(latency=1e-6, bandwidth=1e9, flops=1e9)
# Odd, even, powers of two, and the largest; `make fuzz` takes the others too.
RANKS = sampled(range(1, 17), 1, 2, 3, 4, 7, 16)


@dataclass(frozen=True)
class Case:
    """The shape of a rank's part, the dim that is sharded, and parts."""

    leading: tuple[int, ...]
    features: int
    dim: int
    num_parts: int

    def whole(self, num_ranks: int) -> list[int]:
        """Returns the shape of the parts of all ranks together."""
        shape = [*self.leading, self.features]
        shape[self.dim] *= num_ranks
        return shape


CASES = {
    "tokens": Case((6,), 4, 0, 1),
    "uneven parts": Case((5,), 3, 0, 4),
    "sequence first": Case((2, 3), 4, 0, 2),
    "batch first": Case((2, 3), 4, 1, 3),
    "two leading dims": Case((2, 2, 3), 2, -2, 2),
    "features": Case((3,), 4, -1, 2),
    "features, batch first": Case((2, 3), 3, 2, 3),
}


def cases(exhaustive: tuple[str, ...]) -> pytest.MarkDecorator:
    """All cases on few ranks, the named ones on 1 to 16."""
    return pytest.mark.parametrize(
        ("case", "num_ranks"),
        [
            pytest.param(case, ranks, id=f"{name}, {ranks} ranks")
            for name, case in CASES.items()
            for ranks in range(1, 17 if name in exhaustive else 5)
        ],
    )


every_case = cases(("uneven parts", "features"))
every_case_backward = cases(("uneven parts",))


def integers(*shape: int, seed: int = 0) -> Tensor:
    """Integers small enough that every sum is exact in any order, in float32 too."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).double()


def blocks(x: Tensor, num_ranks: int, dim: int) -> list[Tensor]:
    return [block.contiguous() for block in x.chunk(num_ranks, dim)]


def assert_gradients(results: Any, xs: Sequence[Tensor], ws: Sequence[Tensor]) -> None:
    for (dx, dw), x, w in zip(results, xs, ws, strict=True):
        for ours, leaf in ((dx, x), (dw, w)):
            assert ours is not None
            assert leaf.grad is not None
            assert torch.equal(ours, leaf.grad)


def assert_all_equal(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    for ours, truth in zip(actual, expected, strict=True):
        assert ours.shape == truth.shape
        assert ours.is_contiguous()
        assert torch.equal(ours, truth)


@pytest.mark.sample(20)
@every_case
def test_gather_matmul_equals_the_matmul_of_the_whole(case: Case, num_ranks: int) -> None:
    x = integers(*case.whole(num_ranks))
    ws = [integers(x.shape[-1], n, seed=n) for n in (3, 2)]
    bias = integers(3, seed=5)
    shards = blocks(x, num_ranks, case.dim)

    def kernel(transport: VirtualTransport) -> Steps[tuple[list[Tensor], Tensor]]:
        choice = Choice("gather/ring", case.num_parts)
        return gather_forward(transport, shards[transport.rank], ws, [bias, None], case.dim, choice)

    for (first, second), _ in VirtualNetwork(num_ranks, INSTANT).run(kernel):
        assert_all_equal([first, second], [x @ ws[0] + bias, x @ ws[1]])


@pytest.mark.sample(20)
@every_case
def test_matmul_scatter_equals_the_block_of_the_sum(case: Case, num_ranks: int) -> None:
    *rows, columns = case.whole(num_ranks)
    xs = [integers(*rows, 3, seed=rank) for rank in range(num_ranks)]
    ws = [integers(3, columns, seed=99 + rank) for rank in range(num_ranks)]

    def kernel(transport: VirtualTransport) -> Steps[Tensor]:
        rank = transport.rank
        return scatter_forward(
            transport, xs[rank], ws[rank], case.dim, Choice("scatter/direct", case.num_parts)
        )

    expected = sum((x @ w for x, w in zip(xs, ws, strict=True)), torch.tensor(0.0))
    actual = VirtualNetwork(num_ranks, INSTANT).run(kernel)
    assert_all_equal(actual, blocks(expected, num_ranks, case.dim))


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_matmul_all_reduce_equals_the_sum_on_every_rank(num_ranks: int, num_parts: int) -> None:
    xs = [integers(5, 11, 3, seed=rank) for rank in range(num_ranks)]  # 55 rows: uneven blocks.
    ws = [integers(3, 2, seed=99 + rank) for rank in range(num_ranks)]

    def kernel(transport: VirtualTransport) -> Steps[Tensor]:
        rank = transport.rank
        return reduce_forward(transport, xs[rank], ws[rank], Choice("reduce/direct", num_parts))

    expected = sum((x @ w for x, w in zip(xs, ws, strict=True)), torch.tensor(0.0))
    actual = VirtualNetwork(num_ranks, INSTANT).run(kernel)
    assert_all_equal(actual, [expected] * num_ranks)


@pytest.mark.sample(24)
@pytest.mark.parametrize("again", [False, True])
@every_case_backward
def test_gather_backward_equals_autograd_of_the_whole(
    case: Case, again: bool, num_ranks: int
) -> None:
    x = integers(*case.whole(num_ranks))
    shards = blocks(x, num_ranks, case.dim)
    ws = [[integers(x.shape[-1], n, seed=rank) for n in (3, 2)] for rank in range(num_ranks)]
    dys = [[integers(*x.shape[:-1], n, seed=7 + rank) for n in (3, 2)] for rank in range(num_ranks)]
    scatter = Choice("scatter/direct", case.num_parts)
    gather = Choice("gather/ring", case.num_parts)

    def kernel(transport: VirtualTransport) -> Steps[tuple[Tensor, list[Tensor | None]]]:
        rank, full, dim = transport.rank, None, case.dim
        x, own = shards[rank], ws[rank]
        if not again:
            _, full = yield from gather_forward(transport, x, own, [None, None], dim, gather)
        operands = own, dys[rank], [True, True], dim
        return (yield from gather_backward(transport, x, full, *operands, scatter, gather))

    whole = x.clone().requires_grad_()
    leaves = [[w.clone().requires_grad_() for w in pair] for pair in ws]
    loss = torch.zeros(())
    for pair, cotangents in zip(leaves, dys, strict=True):
        for w, dy in zip(pair, cotangents, strict=True):
            loss = loss + ((whole @ w) * dy).sum()
    torch.autograd.backward(loss)
    assert whole.grad is not None
    results = VirtualNetwork(num_ranks, INSTANT).run(kernel)
    assert_all_equal([dx for dx, _ in results], blocks(whole.grad, num_ranks, case.dim))
    for (_, dws), pair in zip(results, leaves, strict=True):
        for dw, w in zip(dws, pair, strict=True):
            assert dw is not None
            assert w.grad is not None
            assert torch.equal(dw, w.grad)


@pytest.mark.sample(16)
@every_case_backward
def test_scatter_backward_equals_autograd_of_the_whole(case: Case, num_ranks: int) -> None:
    *rows, columns = case.whole(num_ranks)
    xs = [integers(*rows, 3, seed=rank).requires_grad_() for rank in range(num_ranks)]
    ws = [integers(3, columns, seed=99 + rank).requires_grad_() for rank in range(num_ranks)]
    dy = integers(*rows, columns, seed=3)
    shards = blocks(dy, num_ranks, case.dim)

    def kernel(transport: VirtualTransport) -> Steps[tuple[Tensor | None, Tensor | None]]:
        rank = transport.rank
        x, w = xs[rank].detach(), ws[rank].detach()
        choice = Choice("gather/ring", case.num_parts)
        return product_backward(transport, x, w, shards[rank], (True, True), case.dim, choice)

    for x, w in zip(xs, ws, strict=True):
        torch.autograd.backward(((x @ w) * dy).sum())
    assert_gradients(VirtualNetwork(num_ranks, INSTANT).run(kernel), xs, ws)


@pytest.mark.parametrize("num_ranks", RANKS)
@pytest.mark.parametrize("num_parts", [1, 3])
def test_reduce_backward_equals_autograd_of_the_sum_of_cotangents(
    num_ranks: int, num_parts: int
) -> None:
    xs = [integers(5, 11, 3, seed=rank).requires_grad_() for rank in range(num_ranks)]
    ws = [integers(3, 2, seed=99 + rank).requires_grad_() for rank in range(num_ranks)]
    dys = [integers(5, 11, 2, seed=7 + rank) for rank in range(num_ranks)]  # 55 uneven rows.

    def kernel(transport: VirtualTransport) -> Steps[tuple[Tensor | None, Tensor | None]]:
        rank = transport.rank
        x, w = xs[rank].detach(), ws[rank].detach()
        choice = Choice("sum/direct", num_parts)
        return product_backward(transport, x, w, dys[rank], (True, True), None, choice)

    total = sum(dys, torch.zeros(()))
    for x, w in zip(xs, ws, strict=True):
        torch.autograd.backward(((x @ w) * total).sum())
    assert_gradients(VirtualNetwork(num_ranks, INSTANT).run(kernel), xs, ws)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_sums_are_rounded_once(dtype: torch.dtype) -> None:
    """256 and fifteen ones: each one alone is lost in bfloat16, together they are not."""
    step = 1 if dtype is torch.bfloat16 else 0.125  # Half of the spacing of 256 in each format.
    addends = [torch.full((1, 1), 256.0 if rank == 0 else step) for rank in range(16)]
    one = torch.ones(1, 1, dtype=dtype)

    def kernel(transport: VirtualTransport) -> Steps[Tensor]:
        x = addends[transport.rank].to(dtype).expand(16, 1)
        return scatter_forward(transport, x, one, 0, Choice("scatter/direct", 1))

    expected = torch.tensor([[256 + 15 * step]]).to(dtype)
    assert_all_equal(VirtualNetwork(16, INSTANT).run(kernel), [expected] * 16)


def test_addends_are_added_in_rank_order_on_every_rank() -> None:
    values = [1.0, 1e8, -1e8]  # (1 + 1e8) - 1e8 is 0 in float32; any other order gives 1.
    xs = [torch.full((3, 1), value) for value in values]

    def kernel(transport: VirtualTransport) -> Steps[Tensor]:
        choice = Choice("scatter/direct", 1)
        return scatter_forward(transport, xs[transport.rank], torch.ones(1, 1), 0, choice)

    assert [y.item() for y in VirtualNetwork(3, INSTANT).run(kernel)] == [0.0] * 3


BLOCK = 8 * 6 * 8  # Bytes of 8 rows of 6 float64, a rank's block in the test below.
KERNELS: dict[str, tuple[Callable[..., Steps[object]], int]] = {
    "gather/ring": (
        lambda t, c: gather_forward(t, integers(8, 6), [integers(6, 6)], [None], 0, c),
        1,
    ),
    "scatter/direct": (
        lambda t, c: scatter_forward(t, integers(8 * t.num_ranks, 5), integers(5, 6), 0, c),
        1,
    ),
    "reduce/direct": (
        lambda t, c: reduce_forward(t, integers(8 * t.num_ranks, 5), integers(5, 6), c),
        2,
    ),
    "sum/direct": (
        lambda t, c: product_backward(
            t,
            integers(8 * t.num_ranks, 5),
            integers(5, 6),
            integers(8 * t.num_ranks, 6),
            (True, True),
            None,
            c,
        ),
        2,
    ),
}


@pytest.mark.parametrize("schedule", KERNELS)
@pytest.mark.parametrize("num_ranks", RANKS)
def test_bytes_and_messages_equal_the_formula(schedule: str, num_ranks: int) -> None:
    kernel, passes = KERNELS[schedule]
    network = VirtualNetwork(num_ranks, INSTANT)
    network.run(lambda transport: kernel(transport, Choice(schedule, 4)))
    blocks_sent = passes * (num_ranks - 1) * num_ranks
    assert len(network.log) == 4 * blocks_sent
    assert sum(transfer.num_bytes for transfer in network.log) == BLOCK * blocks_sent


def on_meta(*shape: int) -> Tensor:
    return torch.empty(*shape, device="meta")


# Communication takes 0.8 of the computation; latency and the sums are small beside both.
BALANCED = Fabric(latency=1e-6, bandwidth=1e9, flops=4e11, memory=1e12)


@pytest.mark.parametrize("num_ranks", sampled([2, 3, 4, 8, 16], 2, 3, 8))
@pytest.mark.parametrize("num_parts", [1, 2, 8])
@pytest.mark.parametrize("columns", [256, 4096])
def test_predicted_gather_time_is_the_longer_of_the_two_and_one_chunk(
    num_ranks: int, num_parts: int, columns: int
) -> None:
    """The optimum of any schedule that multiplies whole chunks, reached on the virtual clock."""
    rows, inner = 1024, 1024
    network = VirtualNetwork(num_ranks, BALANCED)
    operands = on_meta(rows, inner), [on_meta(inner, columns)], [None], 0
    choice = Choice("gather/ring", num_parts)
    network.run(lambda transport: gather_forward(transport, *operands, choice))
    chunk = BALANCED.compute(2 * rows * inner * columns / num_parts, 0)
    hop = BALANCED.transfer(4 * rows * inner / num_parts)
    num_hops = (num_ranks - 1) * num_parts
    bound = max(num_ranks * num_parts * chunk, num_hops * hop + chunk)
    assert network.seconds == pytest.approx(bound, rel=0.02)


def test_finishing_after_the_weight_gradient_hides_what_pipelining_alone_does_not() -> None:
    """Two ranks, 1024x1024x2048 on 62.5 MB/s, the setting of the measured schedules."""
    fabric = Fabric(latency=1e-4, bandwidth=62.5e6, flops=1.5e11, memory=1e10)
    network = VirtualNetwork(2, fabric)
    x, w = on_meta(1024, 1024), on_meta(1024, 2048)
    choice = Choice("scatter/direct", 4)
    network.run(lambda t: gather_backward(t, x, x, [w], [w], [True], 0, choice, choice))
    one_gradient = fabric.compute(2 * 1024 * 1024 * 2048, 0)
    exchange = 4 * fabric.transfer(4 * 128 * 1024)
    unfused = 2 * one_gradient + exchange
    hidden = (unfused - network.seconds) / min(2 * one_gradient, exchange)
    assert hidden > 0.9


def deadlocked(transport: Transport) -> Steps[None]:
    channel = Channel.open(transport, "ring", num_parts=1)
    peer = 1 - transport.rank
    incoming = Message(peer, transport.rank, Chunk(peer, 0), step=1)
    outgoing = Message(transport.rank, peer, Chunk(transport.rank, 0), step=1)
    yield channel.receive(torch.zeros(1), incoming)
    yield channel.send(torch.zeros(1), outgoing)


def test_a_circle_of_waits_is_reported_rank_by_rank() -> None:
    with told(KernelError):
        VirtualNetwork(2, INSTANT).run(deadlocked)


def one_message(transport: Transport, *, misuse: str) -> Steps[None]:
    channel = Channel.open(transport, "talk", num_parts=1)
    message = Message(0, 1, Chunk(0, 0), step=1)
    buffer = torch.zeros(4, 2).t() if misuse == "strided" else torch.zeros(2, 4)
    handle = (channel.receive if transport.rank else channel.send)(buffer, message)
    if misuse == "overwritten":
        buffer += 1
    if misuse != "abandoned":
        yield handle


MISUSES = {
    "strided": (
        "talk over axis 'virtual': at step 1, rank 0 sends part 0 of block 0 to rank 1: not this "
        "rank's message, a tag already in use, or a buffer that is not contiguous"
    ),
    "overwritten": (
        "talk over axis 'virtual': at step 1, rank 0 sends part 0 of block 0 to rank 1: the buffer "
        "was written while being sent"
    ),
    "abandoned": (
        "transfers that nobody waited for:\n"
        "  talk over axis 'virtual': at step 1, rank 0 sends part 0 of block 0 to rank 1\n"
        "  talk over axis 'virtual': at step 1, rank 1 receives part 0 of block 0 from rank 0"
    ),
}


@pytest.mark.parametrize("misuse", MISUSES)
def test_a_misused_buffer_is_caught(misuse: str) -> None:
    with pytest.raises(KernelError) as caught:
        VirtualNetwork(2, INSTANT).run(partial(one_message, misuse=misuse))
    assert str(caught.value) == MISUSES[misuse]


def test_use_before_arrival_shows_as_nan() -> None:
    def hasty(transport: VirtualTransport) -> Steps[Tensor]:
        gather = Gather(
            transport, "hasty", torch.ones(2, 2), lambda *_: None, Choice("gather/ring", 1)
        )
        yield from gather.start()
        early = gather.full.clone()
        yield from gather.finish()
        return early

    for rank, early in enumerate(VirtualNetwork(2, INSTANT).run(hasty)):
        assert early.isnan().any(dim=1).tolist() == [rank == 1] * 2 + [rank == 0] * 2

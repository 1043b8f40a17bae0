"""The kernels on GPUs; none of these tests has run yet.

Several ranks share one GPU over gloo, staged through the host. NCCL refuses to share: its tests
need two GPUs; with one, copies stand for it. The composition on the CPU is the truth, or integers
are.
"""

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch import make_mesh
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.collectives.scope import Scope, enter_scope
from shardmap_torch.kernels import last_plan
from shardmap_torch.kernels.algorithms import gather_forward, reduce_forward, scatter_forward
from shardmap_torch.kernels.endpoint import Endpoint, endpoint_of
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.lanes import CudaLanes, Lane
from shardmap_torch.kernels.transport import NcclTransport, StagedTransport, Work, pinned, run
from tests.kernels.support.calls import CALLS, SHAPES, body, values_and_gradients
from tests.support.pool import Gloo, Pool

pytestmark = pytest.mark.gpu
two_gpus = pytest.mark.skipif(
    torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each rank"
)

# torch's DeviceMesh wants as many ranks as GPUs, or a multiple.
SIZES = (2,) if torch.cuda.device_count() == 2 else (2, 3)

SLEEP = 50_000_000
"""GPU cycles, about 30 ms: far longer than the host needs to issue all that follows."""


@contextmanager
def gpu_body(device: torch.device) -> Iterator[Endpoint]:
    """A body over axis 'tp' of all processes on `device`."""
    mesh = make_mesh((dist.get_world_size(),), ("tp",), device=device)
    torch.cuda.set_device(device)  # After the mesh, which sets one of its own choice.
    backend = ProcessGroupBackend(mesh)
    with enter_scope(Scope(backend, frozenset(("tp",)))):
        yield endpoint_of(backend, ("tp",), device)


def on_cpu(make: Callable[[str], tuple[Callable[..., Any], list[Tensor]]]) -> list[Tensor]:
    """Values and gradients of the composition."""
    call, operands = make("off")
    with body():
        return values_and_gradients(call, operands, twice=False)


def on_gpu(
    make: Callable[[str], tuple[Callable[..., Any], list[Tensor]]], device: torch.device
) -> list[Tensor]:
    """Values and gradients of the kernel, its operands and cotangents written late."""
    call, operands = make("require")

    def late(*leaves: Tensor) -> Any:
        torch.cuda._sleep(SLEEP)
        return tuple(
            out.cpu() for out in call(*(leaf.to(device, non_blocking=True) for leaf in leaves))
        )

    return values_and_gradients(late, operands, twice=False)


def largest_difference(ours: list[Tensor], truth: list[Tensor]) -> float:
    return max(float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True))


def compare_staged(name: str) -> list[float]:
    device = torch.device("cuda", 0)
    found = []
    for shape in SHAPES:
        for chunks, save in ((1, True), (2, False)):

            def make(
                overlap: str, shape: Any = shape, chunks: int = chunks, save: bool = save
            ) -> Any:
                return CALLS[name](shape, overlap, chunks, save)

            truth = on_cpu(make)
            with gpu_body(device) as endpoint:
                assert isinstance(endpoint.transport, StagedTransport)
                found.append(largest_difference(on_gpu(make, device), truth))
                plan = last_plan()
                assert plan is not None
                assert plan.choice is not None
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_share_a_gpu_over_gloo_get_the_composition_s_values_and_gradients(
    gloo: Gloo, name: str, size: int
) -> None:
    for found in gloo(size).run(compare_staged, name, timeout=250):
        assert max(found) < 1e-10


def sanitized(name: str) -> None:
    """torch's own sanitizer raises at the first access that no event orders."""
    from torch.cuda import _sanitizer

    _sanitizer.enable_cuda_sanitizer()
    device = torch.device("cuda", 0)
    with gpu_body(device):
        on_gpu(lambda overlap: CALLS[name](SHAPES[1], overlap, 2, True), device)


@pytest.mark.parametrize("name", CALLS)
def test_torch_s_sanitizer_finds_no_unordered_access(name: str) -> None:
    pool = Pool(2)  # Of its own: the sanitizer cannot be turned off.
    try:
        pool.run(sanitized, name, timeout=120)
    finally:
        pool.close()


def kernels(t: NcclTransport, x: Tensor, long: Tensor, w: Tensor) -> list[Tensor]:
    outs, _ = run(gather_forward(t, x, [w], [None], 0, Choice("gather/ring", 2)))
    return [
        *outs,
        run(gather_forward(t, x, [w], [None], 0, Choice("gather/ring", 1)))[0][0],
        run(scatter_forward(t, long, w, 0, Choice("scatter/direct", 2))),
        run(scatter_forward(t, long, w, 0, Choice("scatter/direct", 3))),
        run(reduce_forward(t, long, w, Choice("reduce/direct", 2))),
    ]


def are_exact(t: NcclTransport, operands: Sequence[Tensor], truth: Sequence[Tensor]) -> list[bool]:
    """Late operands, then late transfers, with memory that is used again at once."""
    kernels(t, *operands)  # Makes NCCL's communicator, which does wait.
    torch.cuda.synchronize()
    results: list[list[Tensor]] = []
    unused: list[Tensor] = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # The mode warns that it does not see everything.
        torch.cuda.set_sync_debug_mode("error")
    for late in (Lane.COMPUTE, Lane.TRANSFER):
        with t.lanes.on(late):
            torch.cuda._sleep(SLEEP)
        fresh = [torch.empty_like(operand).copy_(operand) for operand in operands]
        results.append(kernels(t, *fresh))
        del fresh  # What takes their memory now is written after the kernels, or the results tell.
        unused += [torch.full_like(operand, float("nan")) for operand in operands]
    torch.cuda.set_sync_debug_mode("default")
    return [
        torch.equal(out.cpu(), true)
        for outs in results
        for out, true in zip(outs, truth, strict=True)
    ]


def replays(t: NcclTransport, operands: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
    """Results of a captured graph for operands that changed since, and what they should be."""
    kernels(t, *operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outs = kernels(t, *operands)
    for operand in operands:
        operand.mul_(2)
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return [out.cpu() for out in outs], [out.cpu() for out in kernels(t, *operands)]


class Peers:
    """Stand for NCCL and all its other ranks: whatever arrives is 3, from the host's memory."""

    def __init__(self) -> None:
        self._hosts: dict[tuple[str, torch.Size], Tensor] = {}

    def __call__(self, sent: Tensor, target: int, received: Tensor, source: int) -> list[Work]:
        self._host("out", sent).copy_(sent, non_blocking=True)
        received.copy_(self._host("in", received), non_blocking=True)
        return []  # The copies are on the current stream.

    def _host(self, use: str, like: Tensor) -> Tensor:
        key = (use, like.shape)
        if key not in self._hosts:
            self._hosts[key] = pinned(like).fill_(3)
        return self._hosts[key]


def integers(*shape: int) -> Tensor:
    generator = torch.Generator().manual_seed(sum(shape))
    return torch.randint(-4, 5, shape, generator=generator).double()


def alone(device: torch.device) -> tuple[NcclTransport, list[Tensor], list[Tensor]]:
    """Rank 0 of 4 on one GPU, integer operands, and the true results."""
    x, long, w = integers(64, 32), integers(256, 32), integers(32, 16)
    gathered = torch.cat([x, torch.full((192, 32), 3.0).double()]) @ w
    block = long[:64] @ w
    total = torch.cat([block + 9, torch.full((192, 16), 3.0).double()])  # Three others, or sums.
    transport = NcclTransport(0, 4, "tp", CudaLanes(device), Peers())
    operands = [each.to(device) for each in (x, long, w)]
    return transport, operands, [gathered, gathered, block + 9, block + 3, total]


def test_on_one_gpu_results_are_exact_and_the_host_waits_for_nothing() -> None:
    assert are_exact(*alone(torch.device("cuda", 0))) == [True] * 10


def test_on_one_gpu_a_captured_graph_computes_with_the_operands_of_its_replay() -> None:
    transport, operands, _ = alone(torch.device("cuda", 0))
    for replayed, truth in zip(*replays(transport, operands), strict=True):
        assert torch.equal(replayed, truth)


def nccl_parts() -> tuple[NcclTransport, list[Tensor], list[Tensor]]:
    """A transport, integer operands, and the true results."""
    rank, size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    group = dist.new_group(backend="nccl")
    assert isinstance(group, dist.ProcessGroup)
    xs, longs, ws = integers(size, 64, 32), integers(size, 64 * size, 32), integers(size, 32, 16)
    total = (longs @ ws).sum(0)
    product = xs.flatten(0, 1) @ ws[rank]
    block = total.chunk(size)[rank]
    operands = [each[rank].to(device) for each in (xs, longs, ws)]
    transport = NcclTransport.over(group, "tp", CudaLanes(device))
    return transport, operands, [product, product, block, block, total]


def exact_over_nccl() -> list[bool]:
    return are_exact(*nccl_parts())


@two_gpus
def test_over_nccl_results_are_exact_and_the_host_waits_for_nothing(gloo: Gloo) -> None:
    for found in gloo(2).run(exact_over_nccl, timeout=120):
        assert found == [True] * 10


def captured_over_nccl() -> list[bool]:
    transport, operands, _ = nccl_parts()
    pairs = zip(*replays(transport, operands), strict=True)
    return [torch.equal(replayed, truth) for replayed, truth in pairs]


@two_gpus
def test_over_nccl_a_captured_graph_computes_with_the_operands_of_its_replay(gloo: Gloo) -> None:
    for found in gloo(2).run(captured_over_nccl, timeout=120):
        assert found == [True] * 5

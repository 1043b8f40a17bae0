"""The kernels' use of streams, compared with the race detector on 1 to 16 ranks."""

import ast
import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves

import shardmap_torch.kernels
from shardmap_torch import R
from shardmap_torch.kernels import all_gather_matmul, matmul_all_reduce, matmul_reduce_scatter
from shardmap_torch.kernels.algorithms import (
    gather_backward,
    gather_forward,
    product_backward,
    reduce_forward,
    scatter_forward,
)
from shardmap_torch.kernels.endpoint import endpoint_of
from shardmap_torch.kernels.executor import Choice
from shardmap_torch.kernels.lanes import CudaLanes, Lane
from shardmap_torch.kernels.schedule import SCHEDULES
from shardmap_torch.kernels.transport import (
    NcclTransport,
    Permute,
    StagedTransport,
    Steps,
    Transport,
    batched,
)
from tests.kernels.support.calls import body, normal
from tests.kernels.support.races import (
    COMPUTE,
    INSTANT,
    NETWORK,
    TRANSPORTS,
    AbandonedError,
    Place,
    RaceDetector,
    RaceError,
    VirtualWork,
    Watched,
    on_host,
    on_network,
    watch,
)
from tests.kernels.support.virtual_network import VirtualNetwork
from tests.support.fuzzing import sampled, sized
from tests.support.pool import Gloo

Kernel: TypeAlias = Callable[[Transport, int], Steps[Any]]


def integers(*shape: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-4, 5, shape, generator=generator).double()


def gather(schedule: str, dim: int, t: Transport, parts: int) -> Steps[Any]:
    inner = 4 * t.num_ranks if dim == 1 else 4
    ws = [integers(inner, columns, seed=columns) for columns in (3, 2)]
    x, bias = integers(6, 4, seed=t.rank), integers(3, seed=9)
    return gather_forward(t, x, ws, [bias, None], dim, Choice(schedule, parts))


def scatter(schedule: str, dim: int, t: Transport, parts: int) -> Steps[Any]:
    rows, columns = (6, 6 * t.num_ranks) if dim == 1 else (6 * t.num_ranks, 3)
    x, w = integers(rows, 2, seed=t.rank), integers(2, columns, seed=50 + t.rank)
    return scatter_forward(t, x, w, dim, Choice(schedule, parts))


def reduce(t: Transport, parts: int) -> Steps[Any]:
    x, w = integers(6 * t.num_ranks, 2, seed=t.rank), integers(2, 3, seed=50 + t.rank)
    return reduce_forward(t, x, w, Choice("reduce/direct", parts))


def column_backward(again: bool, t: Transport, parts: int) -> Steps[Any]:
    ws = [integers(4, columns, seed=columns + t.rank) for columns in (3, 2)]
    dys = [integers(6 * t.num_ranks, columns, seed=t.rank) for columns in (3, 2)]
    direct, ring = Choice("scatter/direct", parts), Choice("gather/ring", parts)
    x = integers(6, 4, seed=t.rank)
    gathered = None if again else integers(6 * t.num_ranks, 4, seed=3)
    return gather_backward(t, x, gathered, ws, dys, [True, True], 0, direct, ring)


def row_backward(t: Transport, parts: int) -> Steps[Any]:
    x, w = integers(6 * t.num_ranks, 2, seed=t.rank), integers(2, 3, seed=50 + t.rank)
    dy = integers(6, 3, seed=t.rank)
    return product_backward(t, x, w, dy, (True, True), 0, Choice("gather/ring", parts))


def sum_backward(t: Transport, parts: int) -> Steps[Any]:
    x, w = integers(7 * t.num_ranks, 2, seed=t.rank), integers(2, 3, seed=50 + t.rank)
    dy = integers(7 * t.num_ranks, 3, seed=t.rank)
    return product_backward(t, x, w, dy, (True, True), None, Choice("sum/direct", parts))


KERNELS: dict[str, Kernel] = {
    "gather/ring": partial(gather, "gather/ring", 0),
    "gather/ring by features": partial(gather, "gather/ring", 1),
    "scatter/direct": partial(scatter, "scatter/direct", 0),
    "scatter/direct by features": partial(scatter, "scatter/direct", 1),
    "reduce/direct": reduce,
    "column backward": partial(column_backward, False),
    "column backward, gathered again": partial(column_backward, True),
    "row backward": row_backward,
    "sum/direct": sum_backward,
}
every_kernel = pytest.mark.parametrize("name", KERNELS)
every_transport = pytest.mark.parametrize("transport", TRANSPORTS)


def tensors(result: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)]


def started(name: str, parts: int, transport: Transport) -> Steps[Any]:
    return KERNELS[name](transport, parts)


def run(name: str, transport: str, num_ranks: int, parts: int = 2, **options: Any) -> Watched:
    return watch(num_ranks, transport, partial(started, name, parts), **options)


@pytest.mark.sample(10)
@pytest.mark.parametrize("num_ranks", sampled(range(1, 17), 2, 5))
@every_transport
@every_kernel
def test_no_kernel_races_and_results_are_those_without_streams(
    name: str, transport: str, num_ranks: int
) -> None:
    for parts in (1, 3) if num_ranks < 4 else (2 if num_ranks < 8 else 1,):
        watched = run(name, transport, num_ranks, parts)
        kernel: Callable[[Transport], Steps[Any]] = partial(started, name, parts)
        expected = VirtualNetwork(num_ranks, INSTANT).run(kernel)
        for ours, truth in zip(tensors(watched.results), tensors(expected), strict=True):
            assert torch.equal(ours, truth)


@pytest.mark.sample(8)
@pytest.mark.parametrize("num_ranks", sampled([2, 3, 5, 8], 3, 5))
@every_kernel
def test_nccl_runs_one_sequence_of_permutations_on_all_ranks(name: str, num_ranks: int) -> None:
    """Also where two exchanges are under way: then no operation can wait for a later one."""
    first, *others = [d.permutations for d in run(name, "nccl", num_ranks).detectors]
    assert others == [first] * (num_ranks - 1)
    assert len(first) >= 2 * (num_ranks - 1)


def places_in_source() -> set[Place]:
    """Every verb that the package says of a lane, or of a transfer below the transports."""
    folder = Path(shardmap_torch.kernels.__file__).parent
    return {
        (node.func.attr, path.name, node.lineno)
        for path in folder.rglob("*.py")
        for part in ast.parse(path.read_text()).body
        # gloo's transfers end before the host goes on.
        if not (isinstance(part, ast.ClassDef) and part.name == "GlooHandle")
        for node in ast.walk(part)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and is_verb(node)
    }


def is_verb(call: ast.Call) -> bool:
    function, *arguments = (ast.unparse(part) for part in (call.func, *call.args))
    if not arguments:
        return function in ("work.wait", "self.work.wait")
    return function.endswith((".record", ".wait", ".keep")) and arguments[0].startswith("Lane.")


def is_missed(place: Place, transport: str) -> bool:
    """Returns whether some kernel is refused when the verb at `place` does nothing."""
    for name in KERNELS:
        if place not in said_by(name, transport):
            continue
        try:
            run(name, transport, 3, skipped=place)
        except RaceError:
            return True
    return False


@cache
def said_by(name: str, transport: str) -> set[Place]:
    return run(name, transport, 3).places


def said_in(transport: str) -> set[Place]:
    said = set().union(*(said_by(name, transport) for name in KERNELS))
    return {place for place in said if place[1] != "races.py"}


def test_every_schedule_is_run_by_these_tests() -> None:
    assert set(SCHEDULES) <= set(KERNELS)


def test_every_record_wait_and_keep_of_the_package_is_run_by_these_tests() -> None:
    said = set().union(*(said_in(transport) for transport in TRANSPORTS))
    assert said == places_in_source()
    assert len(said) > 10


@every_transport
def test_without_any_single_record_wait_or_keep_some_kernel_is_refused(transport: str) -> None:
    places = said_in(transport)
    assert {place for place in places if not is_missed(place, transport)} == set()


@pytest.mark.sample(2)
@every_transport
@every_kernel
def test_a_kernel_that_ends_in_an_error_frees_nothing_in_use(name: str, transport: str) -> None:
    operations = run(name, transport, 3).detectors[0].operations
    stops = [at for at, (_, lane, _) in enumerate(operations, start=1) if lane != NETWORK]
    assert len(stops) > 5
    for stop_after in stops if "/" in name else stops[:: sized(3, 1)]:
        with pytest.raises(AbandonedError):
            run(name, transport, 3, stop_after=stop_after)


@pytest.mark.sample(8)
@every_transport
@every_kernel
def test_a_finished_kernel_holds_no_memory(name: str, transport: str) -> None:
    """Not even in a circle: a GPU's memory must not wait for the garbage collector."""
    gc.disable()
    try:
        watched = run(name, transport, 3)
        watched.results.clear()
        assert [detector.alive() for detector in watched.detectors] == [[]] * 3
    finally:
        gc.enable()


def clocks(watched: Watched, lane: int, *names: str) -> list[list[int]]:
    """Returns a clock for each operation of rank 1 on a lane: what it was issued after."""
    return [
        clock
        for what, where, clock in watched.detectors[1].operations
        if where == lane and what.split(".")[1] in (names or (what.split(".")[1],))
    ]


def test_a_product_waits_for_its_own_message_and_a_forward_for_no_product() -> None:
    num_ranks, parts = 4, 2
    watched = run("gather/ring", "nccl", num_ranks, parts)
    products = clocks(watched, COMPUTE, "mm", "addmm")[::2]  # One of the two weights.
    messages = clocks(watched, NETWORK)
    # A message is two operations of the network: what is sent is read, what arrives is written.
    assert len(messages) == 2 * (num_ranks - 1) * parts
    known = [clock[NETWORK] for clock in products]
    assert known == [0] * parts + [2 * (k + 1) for k in range((num_ranks - 1) * parts)]
    assert len({clock[COMPUTE] for clock in messages}) == 1
    assert messages[0][COMPUTE] < products[0][COMPUTE]


def test_a_message_waits_for_its_own_product_and_a_product_for_none() -> None:
    num_ranks, parts = 4, 2
    watched = run("scatter/direct", "nccl", num_ranks, parts)
    products = clocks(watched, COMPUTE, "mm")
    messages = clocks(watched, NETWORK)[::2]
    assert {clock[NETWORK] for clock in products} == {0}
    sent = products[: (num_ranks - 1) * parts]  # The own block is multiplied last.
    assert [clock[COMPUTE] for clock in messages] == [clock[COMPUTE] for clock in sent]


def watched_permute(group: dist.ProcessGroup, detector: RaceDetector) -> Permute:
    """gloo's batches, which the detector sees on a stream of their own, as NCCL's are."""
    carry = batched(group)

    def permute(sent: Tensor, target: int, received: Tensor, source: int) -> list[Any]:
        done, _, _ = on_network(detector, detector.current, sent, received)
        with _disable_current_modes():
            for work in carry(sent, target, received, source):
                work.wait()
        return [VirtualWork(detector, done, [], None, blocks_host=False)]

    return permute


def layers(x: Tensor, w: Tensor, v: Tensor, u: Tensor, overlap: Any, save: bool) -> list[Tensor]:
    """Three layers on three kernels, forward and backward."""
    leaves = [each.clone().requires_grad_() for each in (x, w, v, u)]
    options: dict[str, Any] = {"overlap": overlap, "chunks": 2}
    gate, up = all_gather_matmul(
        leaves[0], (leaves[1], leaves[2]), "tp", save_gathered=save, bias=None, **options
    )
    down = matmul_reduce_scatter(gate * up, leaves[3], "tp", **options)
    total = matmul_all_reduce(down, leaves[1], "tp", dst=R, **options)
    return [total.detach(), *torch.autograd.grad((total * total).sum(), leaves)]


def watched_layers() -> list[float]:
    """Differences from the composition; the whole of it on the caller's lane and the kernels'."""
    found = []
    for kind, save in product(TRANSPORTS, (False, True)):
        with body() as backend:
            x, w, v, u = normal(1, 6, 4), normal(2, 4, 3), normal(3, 4, 3), normal(4, 3, 4)
            truth = layers(x, w, v, u, "off", save)
            endpoint = endpoint_of(backend, ("tp",))
            detector = RaceDetector(dist.get_rank(), host_may_wait=kind == "staged")
            if kind == "staged":
                endpoint.transport = StagedTransport(
                    endpoint.transport, detector, on_host(detector)
                )
            else:
                assert endpoint.group is not None
                endpoint.transport = NcclTransport(
                    dist.get_rank(),
                    dist.get_world_size(),
                    "tp",
                    detector,
                    watched_permute(endpoint.group, detector),
                )
            with detector:
                ours = layers(x, w, v, u, "require", save)
            detector.finish()
            assert len(detector.places) >= 7
            found += [float((a - b).abs().max()) for a, b in zip(ours, truth, strict=True)]
    return found


@pytest.mark.parametrize("size", [2, 3])
def test_layers_under_autograd_do_not_race(gloo: Gloo, size: int) -> None:
    for found in gloo(size).run(watched_layers):
        assert len(found) == 20
        assert max(found) < 1e-10


class Stream:
    """Stands for `torch.cuda.Stream`, and notes what it is told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.told: list[tuple[str, object]] = []

    def record_event(self) -> "Event":
        return Event(f"event of {self.name}")

    def wait_event(self, event: "Event") -> None:
        self.told.append(("wait", event.name))


class Event:
    def __init__(self, name: str) -> None:
        self.name = name
        self.synchronized = False

    def synchronize(self) -> None:
        self.synchronized = True


class Kept:
    def record_stream(self, stream: Stream) -> None:
        stream.told.append(("keep", self))


def test_cuda_lanes_say_each_verb_to_the_stream_meant(monkeypatch: pytest.MonkeyPatch) -> None:
    """With fakes of torch's methods, which exist in every build of torch."""
    for method in ("record_event", "wait_event"):
        assert callable(getattr(torch.cuda.Stream, method))
    assert callable(torch.cuda.Event.synchronize)
    caller, side = Stream("caller"), Stream("side")
    made: list[tuple[torch.device, int]] = []
    current = [caller]

    def make(device: torch.device, priority: int) -> Stream:
        made.append((device, priority))
        return side

    @contextmanager
    def entered(stream: Stream) -> Iterator[None]:
        current.append(stream)
        yield
        current.pop()

    monkeypatch.setattr(torch.cuda, "Stream", make)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: current[-1])
    monkeypatch.setattr(torch.cuda, "stream", entered)
    device = torch.device("cuda", 1)
    lanes, kept = CudaLanes(device), Kept()
    lanes.wait(Lane.TRANSFER, lanes.record(Lane.COMPUTE))
    lanes.keep(Lane.TRANSFER, kept)  # type: ignore[arg-type]
    with lanes.on(Lane.TRANSFER):
        assert lanes.record(Lane.COMPUTE).name == "event of side"
    mark = lanes.record(Lane.TRANSFER)
    lanes.wait(Lane.COMPUTE, mark)
    assert made == [(device, -1)]
    assert side.told == [("wait", "event of caller"), ("keep", kept)]
    assert caller.told == [("wait", "event of side")]
    assert not mark.synchronized
    lanes.wait(Lane.HOST, mark)
    assert mark.synchronized

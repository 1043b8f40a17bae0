"""Endpoints: the transport of a call along its axes, and the obstacles to overlapping it."""

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol, TypeGuard

import torch
import torch.distributed as dist
from torch import Tensor

from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.backends.recorder import RecordingBackend
from shardmap_torch.collectives.protocol import Backend, is_checker
from shardmap_torch.core.functorch import is_transformed_otherwise
from shardmap_torch.core.torch_private.engine import (
    forward_level,
    functorch,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.kernels.algorithms import gather_forward
from shardmap_torch.kernels.executor import Choice, Gather, complete
from shardmap_torch.kernels.lanes import CudaLanes
from shardmap_torch.kernels.planner import ASSUMED_GPU, Fabric, Overlap
from shardmap_torch.kernels.schedule import Chunk, Message
from shardmap_torch.kernels.transport import (
    Channel,
    GlooTransport,
    Handle,
    NcclTransport,
    StagedTransport,
    Transport,
    network_of,
    run,
)
from shardmap_torch.mesh import PROCESS_KINDS, Mesh

FLOATS: Final = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


@dataclass(slots=True)
class Endpoint:
    """One device of this rank on the network along some axes, with its measured speed."""

    transport: Transport
    group: dist.ProcessGroup | None
    device: torch.device
    _fabrics: dict[torch.dtype, Fabric] = field(default_factory=dict)

    def fabric(self, dtype: torch.dtype) -> Fabric:
        """Returns the measured speed; every rank of the axes must make the first call for a dtype.

        On a GPU nothing is measured; an H200's figures choose the number of parts.
        """
        if self.device.type != "cpu":
            return self._fabrics.get(dtype, ASSUMED_GPU)
        if dtype not in self._fabrics:
            # torch.func.grad may be active, and must not trace the measurement.
            with temporarily_clear_interpreter_stack():
                self._fabrics[dtype] = measure(self.transport, dtype)
        return self._fabrics[dtype]


def is_captured() -> bool:
    """Returns whether a CUDA graph records this thread's work, so that the host must not wait."""
    return torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing()


_ENDPOINTS: dict[tuple[int, tuple[str, ...], torch.device], Endpoint] = {}
CPU: Final = torch.device("cpu")


class Modelled(Backend, Protocol):
    """A backend whose messages have no data: estimates run the kernels as GPUs would."""

    def transport(self, axes: tuple[str, ...]) -> Transport:
        """Returns this rank's end of the network along some axes."""
        ...


def is_modelled(backend: Backend) -> TypeGuard[Modelled]:
    """Returns whether messages of a backend have no data."""
    return hasattr(backend, "transport")


def endpoint_of(
    backend: ProcessGroupBackend | Modelled, axes: tuple[str, ...], device: torch.device = CPU
) -> Endpoint:
    """Returns the endpoint along `axes` of the backend's mesh, on a group of the kernels' own."""
    if not isinstance(backend, ProcessGroupBackend):
        return Endpoint(backend.transport(axes), None, torch.device("cuda"))
    mesh = backend.mesh
    group = mesh.group(axes, "kernels")
    key = (id(mesh), axes, device)
    endpoint = _ENDPOINTS.get(key)
    if endpoint is None or endpoint.group is not group:
        axis = axes[0] if len(axes) == 1 else str(axes)
        endpoint = _ENDPOINTS[key] = Endpoint(_transport(group, axis, device), group, device)
    return endpoint


def _transport(group: dist.ProcessGroup, axis: str, device: torch.device) -> Transport:
    if device.type == "cpu":
        return GlooTransport(group, axis)
    lanes = CudaLanes(device)
    if network_of(group, device.type) == "nccl":
        return NcclTransport.over(group, axis, lanes)
    return StagedTransport(GlooTransport(group, axis), lanes)


@dataclass(frozen=True, slots=True)
class Situation:
    """Circumstances of a call, apart from its size, that decide whether it may overlap."""

    op: str
    backend: Backend
    axes: tuple[str, ...]
    overlap: Overlap
    operands: Sequence[Tensor]

    @property
    def device_type(self) -> str:
        """Device type of the first operand."""
        return self.operands[0].device.type


def _is_transformed(s: Situation) -> bool:
    """Returns whether a transform other than torch.func.grad and vjp is active."""
    if torch.compiler.is_compiling():  # Dynamo cannot trace the question; a later row handles it.
        return False
    return is_transformed_otherwise()


def _is_compiled(s: Situation) -> bool:
    return torch.compiler.is_compiling()  # Dynamo traces no messages from rank to rank.


def _has_no_processes(s: Situation) -> bool:
    return not (isinstance(s.backend, ProcessGroupBackend) or is_modelled(s.backend))


def _is_out_of_order(s: Situation) -> bool:
    return s.axes != tuple(axis for axis in s.backend.mesh.axis_names if axis in s.axes)


def _is_elsewhere(s: Situation) -> bool:
    devices = {operand.device for operand in s.operands}
    return len(devices) > 1 or s.device_type not in ("cpu", "cuda")


def _is_untried(s: Situation) -> bool:
    is_gpu = s.device_type == "cuda" or is_modelled(s.backend)
    return is_gpu and s.overlap != "require"


def _network(backend: Backend, axes: tuple[str, ...], device_type: str) -> str:
    return network_of(backend.mesh.group(axes), device_type)


def _lacks_network(s: Situation) -> bool:
    if is_modelled(s.backend):
        return False
    networks = ("gloo",) if s.device_type == "cpu" else ("gloo", "nccl")
    return _network(s.backend, s.axes, s.device_type) not in networks


def _is_captured_over_gloo(s: Situation) -> bool:
    return (
        s.device_type == "cuda" and is_captured() and _network(s.backend, s.axes, "cuda") == "gloo"
    )


def _mixes_dtypes(s: Situation) -> bool:
    dtype = s.operands[0].dtype
    return dtype not in FLOATS or any(operand.dtype != dtype for operand in s.operands)


OBSTACLES: Final[tuple[tuple[str, Callable[[Situation], bool]], ...]] = (
    ("overlap is off", lambda s: s.overlap == "off"),
    ("replay=True records the composition", lambda s: isinstance(s.backend, RecordingBackend)),
    ("the mesh has no process groups here", _has_no_processes),
    ("the axes have one rank", lambda s: s.backend.mesh.num_ranks(s.axes) == 1),
    ("the axes are not in mesh order", _is_out_of_order),
    ("a transform other than torch.func.grad and vjp is active", _is_transformed),
    ("torch.compile is active, whose own fusions need the composition", _is_compiled),
    ("the operands are not all on the CPU, nor all on one GPU", _is_elsewhere),
    ("autocast is active", lambda s: torch.is_autocast_enabled(s.device_type)),
    ('on a GPU the kernels have never run, and only overlap="require" takes them', _is_untried),
    ("the operands are not of one floating dtype", _mixes_dtypes),
    ("the process group has neither gloo nor, for a GPU, NCCL", _lacks_network),
    ("a CUDA graph is captured, and gloo would wait on the host", _is_captured_over_gloo),
)
"""Reasons to run a call unfused, with their tests, in order: a test may rely on those before it."""


def place_of(backend: Backend, overlap: Overlap) -> Backend | Mesh | None:
    """Returns what decides a call beside its arguments; None where modes do as well.

    On processes that is the backend, in eager code without modes, which do not matter where nothing
    may overlap; on simulated ranks, where nothing ever overlaps, the mesh.
    """
    if backend.mesh.kind not in PROCESS_KINDS:
        return None if is_checker(backend) or is_modelled(backend) else backend.mesh
    if type(backend) is not ProcessGroupBackend or torch.compiler.is_compiling():
        return None
    is_ordinary = overlap == "off" or (
        functorch.peek_interpreter_stack() is None
        and forward_level() < 0
        and not (torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"))
        and not is_captured()
    )
    return backend if is_ordinary else None


def obstacle(situation: Situation) -> str | None:
    """Returns the first obstacle, or None."""
    return next((why for why, holds in OBSTACLES if holds(situation)), None)


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

"""`this_machine`: the processor below, which times each kind of operator and message of a step."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, pairwise
from statistics import median
from typing import Any, ClassVar, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardmap_torch import nn
from shardmap_torch.autodiff.gradients import vjp
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.tree import map_leaves
from shardmap_torch.errors import SpecError, show
from shardmap_torch.mesh import Mesh, make_mesh
from shardmap_torch.mesh.mesh import PROCESS_KINDS
from shardmap_torch.ops import all_reduce, convert
from shardmap_torch.planning.dry_run import DryRun, Like, Operation, Step, dry_run
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.planning.schedule import schedule
from shardmap_torch.spec import P
from shardmap_torch.transform import shard_map
from shardmap_torch.types import I, R

LARGEST: Final = 2**28
"""Bytes that an operator may read and write to be timed; of larger ones rates are known."""

TURN: Final = 1e-3
"""Seconds of short operators, one after the other, that are timed together."""

KEPT: Final = 2**26
"""Bytes of freed memory that malloc keeps at most: `M_TRIM_THRESHOLD` in mallopt(3)."""


@dataclass(frozen=True, eq=False)
class ThisMachine(Hardware):
    """The processor that runs this, alone or as the ranks of a mesh of processes.

    Attributes:
        mesh: processes that compute at the same time; None for this one alone.
        calling: seconds of dispatch and autograd for each operator.
        framing: seconds of Python for each function.
        messaging: seconds for each message, beside those of its operators and frames.
        touching: seconds for each byte of memory that the process has not had before.
        known: seconds of each operation that was timed.
    """

    mesh: Mesh | None = None
    calling: float = 0.0
    framing: float = 0.0
    messaging: float = 0.0
    touching: float = 0.0
    known: dict[str, float] = field(default_factory=dict, repr=False)

    counts: ClassVar[bool] = True

    def on(self, mesh: Mesh) -> "ThisMachine":
        """Returns it with processes in a mesh like this one."""
        if self.mesh is None or mesh.kind in PROCESS_KINDS or mesh.size != self.mesh.size:
            return self if self.mesh is None else replace(self, mesh=mesh, known={})
        like = make_mesh(mesh.axis_sizes, mesh.axis_names, kind=self.mesh.kind)
        return replace(self, mesh=like, known={})

    def overheads(self, run: DryRun) -> Sequence[float]:
        """Returns the time of Python, of autograd, and of memory that the system gives anew.

        A step gives back what it frees, but for twice its largest storage (mallopt(3)).
        """
        kept = min(2 * max((block.nbytes for block in run.blocks), default=0), KEPT)
        live = run.live()
        fresh = accumulate((max(n - live[0] - kept, 0) for n in live), max)
        return [
            step.calls * self.calling
            + step.frames * self.framing
            + bool(step.axes) * self.messaging
            + (after - before) * self.touching
            for step, (before, after) in zip(run.steps, pairwise(fresh), strict=True)
        ]

    def seconds(self, step: Step) -> float:
        """Times an operator; of a larger one computes the time by rates."""
        if step.operation is None or step.traffic > LARGEST:
            return super().seconds(step)
        return self._timed(step.operation, _operator)

    def sending(self, step: Step, num_ranks: int, here: int) -> float:
        """Times a message between processes."""
        if step.operation is None or self.mesh is None:
            return super().sending(step, num_ranks, here)
        return self._timed(step.operation, partial(_message, ProcessGroupBackend(self.mesh)))

    def _timed(self, operation: Operation, make: Callable[[Operation], Callable[[], Any]]) -> float:
        key = str(operation)
        if key not in self.known:
            self.known[key] = timed(make(operation), self.mesh)
        return self.known[key]


def _operator(operation: Operation) -> Callable[[], Any]:
    run: Any = operation.run
    return partial(run, *_tensors(operation.args), **_tensors(operation.kwargs))


def _message(backend: ProcessGroupBackend, operation: Operation) -> Callable[[], Any]:
    run: Any = operation.run
    return partial(backend.communicate, *run, *_tensors(operation.args))


def _tensors(tree: Any) -> Any:
    return map_leaves(lambda x: _tensor(x) if isinstance(x, Like) else x, tree)


def _tensor(like: Like) -> Tensor:
    """Makes a tensor; indices are 0, which every table has."""
    last = sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True))
    x = torch.zeros(0 if 0 in like.shape else last + 1, dtype=like.dtype)
    if like.dtype.is_floating_point:
        x.uniform_()
    return x.as_strided(like.shape, like.stride)


def timed(run: Callable[[], Any], mesh: Mesh | None = None) -> float:
    """Returns the seconds of a call; of processes all call it at once, and the mean is taken."""
    with torch.no_grad():
        first = _turn(run, 1, mesh)
        count = int(_mean(max(1.0, TURN / max(first, 1e-7)), mesh))
        return _mean(median(_turn(run, count, mesh) for _ in range(5)), mesh)


def _turn(run: Callable[[], Any], count: int, mesh: Mesh | None) -> float:
    if mesh is not None and mesh.size > 1:
        dist.barrier()
    start = time.perf_counter()
    for _ in range(count):
        run()
    return (time.perf_counter() - start) / count


def _mean(x: float, mesh: Mesh | None) -> float:
    if mesh is None or mesh.size == 1:
        return x
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / mesh.size


def this_machine(mesh: Mesh | None = None) -> ThisMachine:
    """Measures this machine's processor: rates, new memory, and what Python takes.

    Estimates on it time each operator of a step by itself, on tensors of its shapes with random
    values, as torch's `RuntimeEstimator` does in its mode `operator-level-benchmark`: once for
    equal calls, and by rates where it reads and writes more than 256 MB. What lies between
    operators is measured here, on layers of tensors of 64 bytes.

    Args:
        mesh: of processes, every one of which calls this and estimates the same steps. Operators
            are then timed on all of them at once, so that cores and memory that they share are in
            the figures, and messages are sent. Without one, a rank has the processor alone, and
            messages take no time.

    Raises:
        SpecError: it is no mesh of processes.
    """
    if mesh is not None and not (isinstance(mesh, Mesh) and mesh.kind in PROCESS_KINDS):
        raise SpecError(f"this_machine takes a mesh of processes, or None, not {show(mesh)}.")
    size, new = torch.empty(KEPT, dtype=torch.uint8), partial(torch.zeros, KEPT, dtype=torch.uint8)
    filling = timed(size.zero_, mesh)
    flops = {dtype: _matmuls(dtype, mesh) for dtype in (torch.float32, torch.float64)}
    machine = ThisMachine(
        "this machine", flops | {torch.bfloat16: flops[torch.float32]}, 2**40, KEPT / filling,
        matmul_efficiency=1.0, launch=1e-6, devices=2**40, source="measured by this_machine()",
        mesh=mesh, touching=max(0.0, timed(lambda: new().add_(1), mesh) - 2 * filling) / KEPT,
    )  # fmt: skip
    # Two kinds of layers: of torch's operators, and of this library's functions, which are Python.
    late = [_beside(machine, layer) for layer in (_operators, _functions)]
    counts = torch.tensor([[calls, frames] for _, calls, frames, _ in late], dtype=torch.float64)
    seconds = torch.tensor([seconds for seconds, *_ in late], dtype=torch.float64)
    calling, framing = torch.linalg.solve(counts, seconds).tolist()
    machine = replace(machine, calling=calling, framing=framing)
    seconds_, _, _, messages = _beside(machine, _messages)
    return replace(machine, messaging=max(0.0, seconds_) / max(messages, 1))


def _matmuls(dtype: torch.dtype, mesh: Mesh | None) -> float:
    size = 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / timed(partial(torch.mm, a, b), mesh)


def _beside(machine: ThisMachine, layer: Callable[..., Tensor]) -> tuple[float, int, int, int]:
    """Returns what layers take beyond their estimate: seconds, operators, frames, messages."""
    ranks = 1 if machine.mesh is None else machine.mesh.size
    kind = "simulated" if machine.mesh is None else machine.mesh.kind
    mesh = make_mesh((ranks,), ("ranks",), kind=kind)

    def measured(depth: int) -> tuple[float, int, int, int]:
        spec = P("ranks")
        step = shard_map(partial(_step, layer), mesh=mesh, in_specs=(spec, spec), out_specs=spec)
        args = [torch.ones(4 * ranks, 4)] * depth, torch.ones(4 * ranks, 4)
        run = dry_run(step, args, {}, counts=True)
        step(*args)  # which checks
        end = max(span.end for span in schedule(run, machine)[0])
        return (
            timed(partial(step, *args), machine.mesh) - end,
            sum(each.calls for each in run.steps),
            sum(each.frames for each in run.steps),
            sum(bool(each.axes) for each in run.steps),
        )

    few, many = measured(4), measured(40)
    return tuple(after - before for before, after in zip(few, many, strict=True))  # type: ignore[return-value]


def _step(layer: Callable[..., Tensor], weights: Sequence[Tensor], x: Tensor) -> Any:
    def run(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        for w in weights:
            x = layer(w, x)
        return x * weights[0]

    y, pull = vjp(run, weights, x)
    return pull(y)[0]


def _operators(w: Tensor, x: Tensor) -> Tensor:
    h = functional.silu(x @ w + x)
    return x + h.view(2, 2, 4).transpose(0, 1).reshape(4, 4) * 0.5


def _functions(w: Tensor, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda w, x: x + nn.rms_norm(x, w[0]) @ w, w, x)
    return made


def _messages(w: Tensor, x: Tensor) -> Tensor:
    return convert(all_reduce(x * w, "ranks", dst=I), "ranks", src=I, dst=R)

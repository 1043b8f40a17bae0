"""`this_machine`: the processor below, which times each kind of operator and message of a step."""

import os
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate, cycle, pairwise
from math import ceil, log2
from typing import Any, ClassVar, Final, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from shardmap_torch import nn
from shardmap_torch.autodiff.gradients import vjp
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.checkpoint import checkpoint
from shardmap_torch.core.tree import flatten, map_leaves
from shardmap_torch.errors import SpecError, show
from shardmap_torch.mesh import Mesh, make_mesh
from shardmap_torch.mesh.mesh import PROCESS_KINDS
from shardmap_torch.placing import device_put
from shardmap_torch.planning.dry_run import DryRun, Like, Operation, Step, dry_run
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.spec import P
from shardmap_torch.transform import shard_map

Clock: TypeAlias = Callable[[], float]
"""`time.thread_time`, of this thread's processor whatever else runs, or `time.perf_counter`."""

LARGEST: Final = 2**28
"""Bytes that an operator may read and write to be timed; of larger ones rates are known."""

TURN: Final = 1e-3
"""Seconds of short operators, one after the other, that are timed together."""

CACHED: Final = 2**22
"""Bytes of operands and results that are timed in turn: a step, too, has more than a core's cache.

Without turns a small operator would find its operands in the second level, where it has put them.
"""

KEPT: Final = 2**26
"""Bytes of freed memory that malloc keeps at most: `M_TRIM_THRESHOLD` in mallopt(3)."""


@dataclass(frozen=True, eq=False)
class ThisMachine(Hardware):
    """The processor that runs this, alone or as the ranks of a mesh of processes.

    Attributes:
        mesh: processes that compute at the same time; None for this one alone.
        sharing: ranks for each core that one has for itself: 1 unless there are more than cores.
        calling: seconds of dispatch and autograd for each operator.
        framing: seconds of Python for each function.
        passing: seconds for each tensor that crosses the boundary of a call.
        entering: seconds of a call that does nothing, comparison of ranks included.
        touching: seconds for each byte of memory that the process has not had before.
        apart: seconds that a rank of the step computes between two messages.
        known: seconds of each operation that was timed.
    """

    mesh: Mesh | None = None
    sharing: float = 1.0
    calling: float = 0.0
    framing: float = 0.0
    passing: float = 0.0
    entering: float = 0.0
    touching: float = 0.0
    apart: float = 0.0
    known: dict[tuple[str, float], float] = field(default_factory=dict, repr=False)

    counts: ClassVar[bool] = True
    hides: ClassVar[bool] = False  # gloo sends on the cores that compute

    def on(self, run: DryRun) -> "ThisMachine":
        """Returns it with processes in the mesh of a run, or in one like it."""
        mesh = run.mesh
        if self.mesh is None:
            return self
        if mesh.kind not in PROCESS_KINDS and mesh.size == self.mesh.size:
            mesh = make_mesh(mesh.axis_sizes, mesh.axis_names, kind=self.mesh.kind)
        here = replace(self, mesh=mesh, known={})
        computing = sum(here.seconds(step) for step in run.steps if not step.axes)
        num_messages = sum(step.axes != () and not step.waits for step in run.steps)
        apart = (computing + sum(here.overheads(run))) / max(num_messages, 1) / self.sharing
        return replace(here, apart=min(apart, LONGEST))

    def overheads(self, run: DryRun) -> Sequence[float]:
        """Returns the time of Python, of autograd, and of memory that the system gives anew.

        A step gives back what it frees, but for twice its largest storage (mallopt(3)).
        """
        kept = min(2 * max((block.nbytes for block in run.blocks), default=0), KEPT)
        live = run.live()
        fresh = accumulate((max(n - live[0] - kept, 0) for n in live), max)
        found = [
            step.calls * self.calling
            + step.frames * self.framing
            + (after - before) * self.touching
            for step, (before, after) in zip(run.steps, pairwise(fresh), strict=True)
        ]
        if found:
            found[-1] += self.entering / self.sharing + run.leaves * self.passing
        return [self.sharing * each for each in found]

    def seconds(self, step: Step) -> float:
        """Times an operator; of a larger one computes the time by rates."""
        if step.operation is None or step.traffic > LARGEST:
            return super().seconds(step)
        return self.sharing * self._timed(step.operation, _operator, time.thread_time)

    def sending(self, step: Step, mesh: Mesh) -> float:
        """Times a message between processes, which begin it when they have computed for a while.

        So the wait for the last one to begin is part of it, as in a step.
        """
        if step.operation is None or self.mesh is None:
            return super().sending(step, mesh)
        apart = 2.0 ** ceil(log2(self.apart)) if self.apart > SHORTEST else 0.0
        make = partial(_message, ProcessGroupBackend(self.mesh), apart)
        seconds = self._timed(step.operation, make, time.perf_counter, apart)
        return max(0.0, seconds - apart * self.sharing)

    def _timed(
        self, operation: Operation, make: Callable[[Operation], Callable[[], Any]], clock: Clock,
        apart: float = 0.0,
    ) -> float:  # fmt: skip
        key = str(operation), apart
        if key not in self.known:
            self.known[key] = timed(make(operation), self.mesh, clock)
        return self.known[key]


SHORTEST: Final = 2.0**-16
LONGEST: Final = 2.0**-8
"""Seconds between messages: shorter ones are none, longer ones no different."""


def _operator(operation: Operation) -> Callable[[], Any]:
    """Returns what runs an operator, on one set of operands after the other."""
    run: Any = operation.run
    sets = [_tensors((operation.args, operation.kwargs))]
    result = run(*sets[0][0], **sets[0][1])
    size = sum(x.nbytes for x in flatten((sets, result))[0] if isinstance(x, Tensor))
    count = min(MOST, 1 + CACHED // max(size, 1))
    sets += [_tensors((operation.args, operation.kwargs)) for _ in range(count - 1)]
    results = [result] * len(sets)

    def once() -> None:
        args, kwargs = next(turns)
        results.append(run(*args, **kwargs))
        del results[0]

    turns = cycle(sets)
    return once


MOST: Final = 64
"""Sets of operands at most."""


def _message(backend: ProcessGroupBackend, apart: float, operation: Operation) -> Callable[[], Any]:
    run: Any = operation.run
    send = partial(backend.communicate, *run, *_tensors(operation.args))

    def once() -> None:
        end = time.thread_time() + apart
        while time.thread_time() < end:
            pass
        send()

    return once if apart else send


def _tensors(tree: Any) -> Any:
    return map_leaves(lambda x: _tensor(x) if isinstance(x, Like) else x, tree)


def _tensor(like: Like) -> Tensor:
    """Makes a tensor; indices are 0, which every table has."""
    last = sum((size - 1) * step for size, step in zip(like.shape, like.stride, strict=True))
    x = torch.zeros(0 if 0 in like.shape else last + 1, dtype=like.dtype)
    if like.dtype.is_floating_point:
        x.uniform_()
    return x.as_strided(like.shape, like.stride)


def timed(
    run: Callable[[], Any], mesh: Mesh | None = None, clock: Clock = time.perf_counter
) -> float:
    """Returns the seconds of a call; of processes all call it at once, and the mean is taken.

    What else runs adds to some turns, so that it is the lower quartile of them.
    """
    with torch.no_grad():
        first = _turn(run, 1, mesh, clock)
        count = int(_mean(max(1.0, TURN / max(first, 1e-7)), mesh))
        return _mean(quartile(_turn(run, count, mesh, clock) for _ in range(8)), mesh)


def quartile(times: Iterable[float]) -> float:
    """Returns the lower quartile."""
    ascending = sorted(times)
    return ascending[len(ascending) // 4]


def _turn(run: Callable[[], Any], count: int, mesh: Mesh | None, clock: Clock) -> float:
    if mesh is not None and mesh.size > 1:
        dist.barrier()
    start = clock()
    for _ in range(count):
        run()
    return (clock() - start) / count


def _mean(x: float, mesh: Mesh | None) -> float:
    if mesh is None or mesh.size == 1:
        return x
    total = torch.tensor(x, dtype=torch.float64)
    dist.all_reduce(total)
    return float(total) / mesh.size


def this_machine(mesh: Mesh | None = None) -> ThisMachine:
    """Measures this machine's processor: rates, new memory, and what a call takes.

    Estimates on it time each operator of a step by itself, on tensors of its shapes with random
    values, as torch's `RuntimeEstimator` does in its mode `operator-level-benchmark`: once for
    equal calls, and by rates where it reads and writes more than 256 MB. What an operator takes
    beside that, what a Python function takes, and a tensor that crosses the boundary of a call,
    is measured here, on 40 layers of 64 KB each: a core's own cache does not hold them beside
    torch's code.

    Computing is measured in seconds of the processor, so that estimates are of a machine that
    does nothing else; messages and the comparison of ranks in those of a clock.

    Args:
        mesh: of processes of this machine, every one of which calls this and estimates the same
            steps. Operators are then timed on all of them at once, so that memory that they share
            is in the figures; ranks share cores where there are more of them, and messages are
            sent. Without one, a rank has the processor alone, and messages take no time.

    Raises:
        SpecError: it is no mesh of processes.

    Source: `torch.distributed._tools.RuntimeEstimator`.
    """
    if mesh is not None and not (isinstance(mesh, Mesh) and mesh.kind in PROCESS_KINDS):
        raise SpecError(f"this_machine takes a mesh of processes, or None, not {show(mesh)}.")
    clock = time.thread_time
    size, new = torch.empty(KEPT, dtype=torch.uint8), partial(torch.zeros, KEPT, dtype=torch.uint8)
    filling = timed(size.zero_, mesh, clock)
    new_memory = timed(lambda: new().add_(1), mesh, clock) - 2 * filling
    flops = {dtype: _matmuls(dtype, mesh) for dtype in (torch.float32, torch.float64)}
    cores = len(os.sched_getaffinity(0)) / torch.get_num_threads()
    machine = ThisMachine(
        "this machine", flops | {torch.bfloat16: flops[torch.float32]}, 2**40, KEPT / filling,
        matmul_efficiency=1.0, launch=1e-6, devices=2**40, source="measured by this_machine()",
        mesh=mesh, sharing=max(1.0, (1 if mesh is None else mesh.size) / cores),
        touching=max(0.0, new_memory) / KEPT,
    )  # fmt: skip
    # Layers of torch's operators, of this library's functions, and of leaves alone.
    bodies = partial(_step, _operators), partial(_step, _functions), _identity
    counts, seconds = zip(*(_beside(machine, body) for body in bodies), strict=True)
    matrix = torch.tensor(counts, dtype=torch.float64)
    prices = torch.linalg.solve(matrix, torch.tensor(seconds, dtype=torch.float64))
    calling, framing, passing = prices.clamp(min=0.0).tolist()
    step, args = _layers(machine, _identity, 1)
    entering = timed(partial(step, *args), mesh)
    return replace(machine, calling=calling, framing=framing, passing=passing, entering=entering)


def _matmuls(dtype: torch.dtype, mesh: Mesh | None) -> float:
    size = 512
    a, b = torch.ones(size, size, dtype=dtype), torch.ones(size, size, dtype=dtype)
    return 2 * size**3 / timed(partial(torch.mm, a, b), mesh, time.thread_time)


ROWS: Final = 64
WIDTH: Final = 128
"""Sizes of layers. Beside 40 of them torch's code does not stay in a core's own cache."""

Layer: TypeAlias = Callable[[Tensor, Tensor], Tensor]
Body: TypeAlias = Callable[[Sequence[Tensor], Tensor], Any]


def _beside(machine: ThisMachine, body: Body) -> tuple[list[int], float]:
    """Returns how many operators, frames and leaves layers have, and what all of these take."""

    def measured(depth: int) -> tuple[list[int], float]:
        step, args = _layers(machine, body, depth)
        run = dry_run(step, args, {}, counts=True)
        known = sum(map(machine.seconds, run.steps)) / machine.sharing
        seconds = timed(partial(step, *args), machine.mesh, time.thread_time)
        calls, frames = (sum(getattr(x, n) for x in run.steps) for n in ("calls", "frames"))
        return [calls, frames, run.leaves], seconds - known

    (few, less), (many, more) = measured(4), measured(40)
    return [b - a for a, b in zip(few, many, strict=True)], more - less


def _layers(machine: ThisMachine, body: Body, depth: int) -> tuple[Callable[..., Any], Any]:
    """Makes a step of so many layers, which has run, and its arguments."""
    ranks = 1 if machine.mesh is None else machine.mesh.size
    kind = "simulated" if machine.mesh is None else machine.mesh.kind
    mesh = make_mesh((ranks,), ("ranks",), kind=kind)
    spec = P("ranks")
    step = shard_map(body, mesh=mesh, in_specs=(spec, spec), out_specs=spec, check=True)
    args = [torch.ones(WIDTH * ranks, WIDTH)] * depth, torch.ones(ROWS * ranks, WIDTH)
    args = device_put(args, mesh, (spec, spec))
    step(*args)  # which checks
    return step, args


def _step(layer: Layer, weights: Sequence[Tensor], x: Tensor) -> Any:
    def run(weights: Sequence[Tensor], x: Tensor) -> Tensor:
        for w in weights:
            x = layer(w, x)
        return x

    y, pull = vjp(run, weights, x)
    return pull(y)[0]


def _operators(w: Tensor, x: Tensor) -> Tensor:
    h = functional.silu(x @ w + x)
    return x + h.view(2, -1, WIDTH).transpose(0, 1).reshape(ROWS, WIDTH) * 0.5


def _functions(w: Tensor, x: Tensor) -> Tensor:
    made: Tensor = checkpoint(lambda w, x: x + nn.rms_norm(x, w[0]) @ w, w, x)
    return made


def _identity(weights: Sequence[Tensor], x: Tensor) -> Sequence[Tensor]:
    return weights

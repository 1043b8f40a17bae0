"""Plans a call: predicts its time with and without overlap, and picks the number of chunks."""

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final, Literal, TypeAlias, get_args

from shardmap_torch.errors import KernelError
from shardmap_torch.kernels.executor import Choice

Overlap: TypeAlias = Literal["auto", "require", "off"]


@dataclass(frozen=True, slots=True)
class Fabric:
    """Speed of one rank and of its link, in seconds, bytes and flops.

    Attributes:
        latency: Seconds from the start of a message to the arrival of its first byte (alpha).
        bandwidth: Bytes a second in each direction of a rank's link (1 / beta).
        flops: Multiply and add operations a second in a large matmul.
        memory: Bytes a second that element-wise work moves.
        launch: Fixed seconds of every matmul or sum.
        overlap: Share of a transfer that can proceed while this rank computes; 1 where a network
            card moves the bytes, near 0 on loopback, where the same cores do.
    """

    latency: float
    bandwidth: float
    flops: float
    memory: float = float("inf")
    launch: float = 0.0
    overlap: float = 1.0

    def transfer(self, num_bytes: float) -> float:
        """Predicts the seconds from send to arrival of one message on an idle link."""
        return self.latency + num_bytes / self.bandwidth

    def compute(self, flops: float, traffic: float = 0.0) -> float:
        """Predicts the seconds of one kernel: the slower of arithmetic and memory (roofline)."""
        return self.launch + max(flops / self.flops, traffic / self.memory)


ASSUMED_GPU: Final = Fabric(
    latency=5e-6, bandwidth=0.8 * 450e9, flops=0.7 * 989e12, memory=0.8 * 4.8e12, launch=2e-6
)
"""An H200 on NVLink in bfloat16, from data sheets and estimates (docs/overlap.md), not measured."""

MAX_PARTS = 8
MIN_ROWS = 128
"""Rows of a chunk below which matmuls lose more (41 to 45 % at 64 rows) than overlap wins."""

MIN_GAIN = 0.03
"""Predicted gain below which the unfused composition runs: the model is no better than that."""


@dataclass(frozen=True, slots=True)
class Options:
    """Options of a call; None leaves a choice to the cost model."""

    overlap: Overlap = "auto"
    chunks: int | None = None
    save_gathered: bool = True


@dataclass(frozen=True, slots=True)
class Problem:
    """Sizes of a kernel call, on which its time depends.

    Attributes:
        op: Name of the operation.
        axis: Mesh axis, as the user wrote it.
        num_ranks: Ranks on the axis.
        schedule: The schedule of the exchange.
        block_rows: Rows of a rank's block of the gathered or summed matrix.
        block_bytes: Bytes of that block; each rank sends it to or through every other.
        flops: Work that is pipelined with the communication.
        tail_flops: Work that follows it and hides the last transfers.
        passes: Number of times that the blocks are exchanged: 2 for an all-reduce.
    """

    op: str
    axis: str
    num_ranks: int
    schedule: str
    block_rows: int
    block_bytes: float
    flops: float
    tail_flops: float = 0.0
    passes: int = 1


@dataclass(frozen=True, slots=True)
class Plan:
    """The schedule of a call, or None for the unfused composition, and the reason.

    Attributes:
        op: Name of the operation; the backward's ends in "backward".
        axis: Mesh axis.
        choice: Schedule and parts, or None: the unfused composition.
        reason: Why it was chosen.
        unfused: Predicted seconds without overlap, if the model was asked.
        overlapped: Predicted seconds with overlap, if the model was asked.
    """

    op: str
    axis: str
    choice: Choice | None
    reason: str
    unfused: float | None = None
    overlapped: float | None = None

    def __str__(self) -> str:
        return f"{self.op} over {self.axis}: {self.choice or 'unfused'} ({self.reason})"


def unfused_seconds(problem: Problem, fabric: Fabric) -> float:
    """Predicts the time without overlap: communication of the blocks, then the matmuls."""
    compute = fabric.compute(problem.flops)
    if problem.tail_flops:
        compute += fabric.compute(problem.tail_flops)
    return compute + problem.passes * (problem.num_ranks - 1) * fabric.transfer(problem.block_bytes)


def overlapped_seconds(problem: Problem, fabric: Fabric, num_parts: int) -> float:
    """Predicts the time with overlap: the longer of all work, and all transfers plus one chunk.

    Where blocks are exchanged twice, two parts cannot be hidden behind the work: the last finished
    chunks, or the first addends. A fabric whose transfers need this rank's own cores gains only its
    share (`Fabric.overlap`) of that.
    """
    num_chunks = problem.num_ranks * num_parts
    chunk = fabric.compute(problem.flops / num_chunks)
    work = num_chunks * chunk
    if problem.tail_flops:
        work += fabric.compute(problem.tail_flops)
    num_blocks = problem.num_ranks - 1
    part_travel = num_blocks * fabric.transfer(problem.block_bytes / num_parts)
    travel = problem.passes * num_parts * part_travel
    trailing = (problem.passes - 1) * min(2, num_parts) * part_travel
    ideal = max(work + trailing, travel + chunk)
    return work + travel - fabric.overlap * (work + travel - ideal)


def candidates(problem: Problem, chunks: int | None) -> tuple[int, ...]:
    """Returns the numbers of parts to choose from; none if the block itself is too small.

    Raises:
        KernelError: If `chunks` is no number of parts that the block has rows for.
    """
    if chunks is not None:
        if not 1 <= chunks <= problem.block_rows:
            raise KernelError(
                f"{problem.op} over axis {problem.axis}: chunks={chunks} splits a rank's block of "
                f"{problem.block_rows} rows; it must be from 1 to {problem.block_rows}."
            )
        return (chunks,)
    powers = (2**k for k in range(MAX_PARTS.bit_length()))
    return tuple(parts for parts in powers if parts * MIN_ROWS <= problem.block_rows)


def best(problem: Problem, fabric: Fabric, parts: Sequence[int]) -> tuple[Choice, float]:
    """Returns the parts with the shortest predicted time, fewer on a tie, and that time."""
    seconds = {num: overlapped_seconds(problem, fabric, num) for num in parts}
    num_parts = min(seconds, key=lambda num: (seconds[num], num))
    return Choice(problem.schedule, num_parts), seconds[num_parts]


def decide(
    problem: Problem, fabric: Callable[[], Fabric], chunks: int | None, *, forced: bool
) -> Plan:
    """Plans to overlap where the model predicts a gain of at least 3 %, or where `forced`.

    `fabric` is called only where there is something to decide, since it may have to be measured.
    """
    options = candidates(problem, chunks) or ((1,) if forced else ())
    if not options:
        reason = f"a rank's block has {problem.block_rows} rows; a chunk needs {MIN_ROWS}"
        return Plan(problem.op, problem.axis, None, reason)
    speed = fabric()
    before = unfused_seconds(problem, speed)
    choice, after = best(problem, speed, options)
    gain = before / after - 1
    reason = f"the model predicts {gain:+.0%} from overlap" + (", required" if forced else "")
    chosen = choice if forced or gain >= MIN_GAIN else None
    return Plan(problem.op, problem.axis, chosen, reason, before, after)


def obstructed(op: str, axis: str, overlap: Overlap, obstacle: str) -> Plan:
    """Plans the unfused composition, because of `obstacle`.

    Raises:
        KernelError: If overlap is required.
    """
    if overlap == "require":
        raise KernelError(
            f"{op} over axis {axis} cannot overlap: {obstacle}.\n"
            'Fix: pass overlap="auto" to run the unfused composition where overlap is not possible.'
        )
    return Plan(op, axis, None, obstacle)


def check_overlap(op: str, overlap: str) -> None:
    """Requires that `overlap` is one of the three modes."""
    if overlap not in get_args(Overlap):
        raise KernelError(f"{op}: overlap={overlap!r} is none of {', '.join(get_args(Overlap))}.")


class _Record(threading.local):
    last: Plan | None = None


_RECORD = _Record()


def record(plan: Plan) -> Plan:
    """Remembers `plan` as this thread's last."""
    _RECORD.last = plan
    return plan


def last_plan() -> Plan | None:
    """Returns the plan of the last kernel call on this thread; None before the first.

    Example:
        >>> from concurrent.futures import ThreadPoolExecutor
        >>> with ThreadPoolExecutor() as another_thread:
        ...     print(another_thread.submit(last_plan).result())
        None
    """
    return _RECORD.last

"""`estimate`: memory and time of a checked call on given hardware, without running it."""

import json
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shardmap_torch.checker.explanation import Explanation, Row
from shardmap_torch.core.caching import lazy
from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import SpecError, show
from shardmap_torch.planning.dry_run import ARGUMENT, Block, DryRun, dry_run
from shardmap_torch.planning.hardware import Hardware
from shardmap_torch.planning.page import entries, timeline
from shardmap_torch.planning.schedule import Span, schedule
from shardmap_torch.report.page import Page, Shown, Table
from shardmap_torch.report.units import show_bytes, show_seconds
from shardmap_torch.run.safety.full_collections import postponing_full_collections


@dataclass(frozen=True, eq=False, repr=False)
class Estimate(Shown):
    """Memory and time of a call on one rank.

    Attributes:
        run: the operations, messages and storages of the rank.
        hardware: on which it is estimated.
    """

    run: DryRun
    hardware: Hardware

    @lazy
    def _schedule(self) -> tuple[list[Span], Mapping[str, float]]:
        with postponing_full_collections():
            return schedule(self.run, self.hardware)

    @property
    def spans(self) -> Sequence[Span]:
        """Every step in time, in order."""
        return self._schedule[0]

    @property
    def exposed(self) -> Mapping[str, float]:
        """Seconds in which the rank waits for messages, by axes."""
        return self._schedule[1]

    @property
    def seconds(self) -> float:
        """The time of the call."""
        return max((span.end for span in self.spans), default=0.0)

    @property
    def flops(self) -> int:
        """Floating-point operations of the rank; what is recomputed counts again."""
        return sum(step.flops for step in self.run.steps)

    @property
    def utilization(self) -> float:
        """The part of the peak of the matmuls' dtype that `flops` in `seconds` are."""
        dtypes = Counter({s.dtype: 0 for s in self.run.steps})
        for step in self.run.steps:
            dtypes[step.dtype] += step.flops
        if not dtypes or not self.seconds:
            return 0.0
        peaks = self.hardware.flops
        fastest = sum(
            count / peaks.get(dtype, min(peaks.values())) for dtype, count in dtypes.items()
        )
        return fastest / self.seconds

    @property
    def sent(self) -> Mapping[str, int]:
        """Bytes that the rank sends, by axes."""
        found: Counter[str] = Counter()
        for step in self.run.steps:
            if step.sent:
                found[",".join(step.axes)] += step.sent
        return dict(found)

    @lazy
    def live(self) -> tuple[int, ...]:
        """Bytes alive before the first step and after each."""
        return tuple(self.run.live())

    @property
    def peak(self) -> int:
        """The largest number of bytes alive at a time."""
        return max(self.live)

    @property
    def peak_site(self) -> Site | None:
        """The line at which most is alive."""
        return self.run.steps[at - 1].site if (at := self.live.index(self.peak)) else None

    @property
    def fits(self) -> bool:
        """Returns whether the peak is within the memory of the device."""
        return self.peak <= self.hardware.memory

    @property
    def at_peak(self) -> Mapping[str, int]:
        """Bytes alive at the peak, by what they are."""
        at, found = self.live.index(self.peak), dict.fromkeys(_KINDS, 0)
        for block in self.run.blocks:
            if block.born <= at and (block.died is None or block.died > at):
                found[_kind(block)] += block.nbytes
        return found

    @property
    def donatable(self) -> int:
        """Bytes of results that could have the memory of arguments, if these were donated.

        An upper bound of what `shard_map(..., donate=...)` saves: of results as large as arguments
        that are alive at the peak.
        """
        at = self.live.index(self.peak)
        blocks = [block for block in self.run.blocks if block.born <= at]
        taken = Counter(b.nbytes for b in blocks if b.owner == ARGUMENT and not b.is_result)
        made = Counter(b.nbytes for b in blocks if b.owner != ARGUMENT and b.is_result)
        return sum(size * count for size, count in (taken & made).items())

    def __str__(self) -> str:
        """Formats time, memory and messages, a line each."""
        name, mesh, hardware = self.run.name, self.run.mesh, self.hardware
        lines = [
            f"{name} on the {mesh}, each rank on {hardware.name}:",
            f"  time    {show_seconds(self.seconds)}, {self.flops:.3g} FLOP, "
            f"{self.utilization:.0%} of the peak",
            f"  memory  {show_bytes(self.peak)} of {show_bytes(hardware.memory)} at most"
            + ("" if self.fits else ": DOES NOT FIT")
            + (f", at {self.peak_site}" if self.peak_site is not None else ""),
            *(f"    {show_bytes(n):>10}  {kind}" for kind, n in self.at_peak.items() if n),
        ]
        if self.donatable > self.peak // 100:
            lines.append(f"    donate= would save up to {show_bytes(self.donatable)}")
        lines += [
            f"  {axes}: sends {show_bytes(count)}, waits {show_seconds(self.exposed.get(axes, 0))}"
            for axes, count in sorted(self.sent.items())
        ]
        return "\n".join(lines)

    __repr__ = __str__

    def to_json(self) -> dict[str, Any]:
        """Returns the figures as data that JSON can express."""
        return {
            "seconds": self.seconds,
            "flops": self.flops,
            "utilization": self.utilization,
            "peak_bytes": self.peak,
            "at_peak": dict(self.at_peak),
            "donatable_bytes": self.donatable,
            "fits": self.fits,
            "sent": dict(self.sent),
            "waits": dict(self.exposed),
        }

    def beside(self, explanation: Explanation) -> Explanation:
        """Returns what `explain` says of the same call, with time and memory of each operation.

        Rows that a rank does not run by themselves, such as views and conversions, have none.
        """
        costs: defaultdict[tuple[Any, ...], list[float]] = defaultdict(lambda: [0.0, 0, 0])
        made = Counter[int]()
        for block in self.run.blocks:
            made[block.born] += block.nbytes
        for number, span in enumerate(self.spans, 1):
            cost = costs[span.step.site, span.step.name, span.step.backward]
            for at, value in enumerate((span.end - span.start, made[number], 1)):
                cost[at] += value

        def estimated(row: Row) -> Row:
            seconds, memory, count = costs.get(
                (row.site, row.operation, row.is_backward), (0, 0, 0)
            )
            if not count:
                return row
            return replace(row, seconds=seconds / count, allocated=round(memory / count))

        return explanation.with_rows(estimated)

    def page(self) -> Page:
        """Returns a page: lanes and memory over time, and the cost of each line of the source."""
        peak = None if (site := self.peak_site) is None else (site.file, site.line)
        memory = [(kind, show_bytes(count)) for kind, count in self.at_peak.items() if count]
        messages = [
            (axes, show_bytes(count), show_seconds(self.exposed.get(axes, 0.0)))
            for axes, count in sorted(self.sent.items())
        ]
        return Page(
            f"{self.run.name} on the {self.run.mesh}, each rank on {self.hardware.name}",
            f"{show_seconds(self.seconds)} a call, {show_bytes(self.peak)} of "
            f"{show_bytes(self.hardware.memory)}" + ("" if self.fits else ": does not fit"),
            entries(self.spans, peak),
            [
                Table("Memory at the peak", ("", "bytes"), memory),
                Table("Messages", ("axes", "sent", "waited for"), messages),
            ],
            figures=[timeline(self.spans, self.live)],
        )

    def save_trace(self, path: str | Path, *, profile: str | Path | None = None) -> None:
        """Writes both lanes and the memory as a trace that Perfetto and Chrome show.

        Args:
            path: of the trace.
            profile: of what `torch.profiler.profile` has exported of a run of the step, by
                `export_chrome_trace`; its lanes stand below the estimated ones. On processes
                it has collectives by their names and lines.
        """
        events: list[dict[str, Any]] = [
            {"ph": "X", "pid": 0, "tid": span.lane, "name": span.step.name,
             "ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6,
             "args": {"line": str(span.step.site), "backward": span.step.backward}}
            for span in self.spans
        ]  # fmt: skip
        events += [
            {"ph": "C", "pid": 0, "name": "memory", "ts": span.end * 1e6, "args": {"bytes": alive}}
            for span, alive in zip(self.spans, self.live[1:], strict=True)
        ]
        events += [] if profile is None else _measured(profile)
        Path(path).write_text(json.dumps({"traceEvents": events}))


def _measured(profile: str | Path) -> list[dict[str, Any]]:
    """Returns the events of an exported profile, as those of a second process that starts at 0."""
    try:
        found = json.loads(Path(profile).read_text())["traceEvents"]
        spans = [event for event in found if event.get("ph") == "X" and event.get("cat") in _LANES]
        first = min((event["ts"] for event in spans), default=0)
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise SpecError(f"save_trace: profile={show(profile)} is no exported profile.") from error
    names = enumerate(("estimated", "measured"))
    return [
        {"ph": "M", "pid": pid, "name": "process_name", "args": {"name": name}}
        for pid, name in names
    ] + [
        event | {"pid": 1, "tid": f"{event['cat']} {event['tid']}", "ts": event["ts"] - first}
        for event in spans
    ]


_LANES: Final = ("cpu_op", "user_annotation", "kernel", "gpu_memcpy", "gpu_memset")
"""Kinds of events that profiles have of operators and collectives."""


def estimate(f: Callable[..., Any], *args: Any, hardware: Hardware, **kwargs: Any) -> Estimate:
    """Estimates memory and time of a call on one rank, without running it.

    The call is checked, and its first rank then runs on tensors without data: the operations of the
    body, of the backward that autograd derives, and of the optimizer, in their order, with the
    storages that are alive at each. An operator takes as long as its operations or its bytes, a
    collective as a ring over its axes' links; the rank waits for it, but for gathers that begin
    early. Everything is eager: fusion by a compiler, allocator fragmentation, and imbalance of
    ranks are not in it. Kernels with `overlap="require"` follow their schedules, chunk by chunk.

    Args:
        f: a function of `shard_map`, on a mesh of any kind; abstract ones too.
        *args: its arguments; `ShapeDtype` in place of tensors.
        hardware: `H100`, `this_machine()`, `read_hardware(path)`, or a `Hardware` of your own.
        **kwargs: its keyword arguments.

    Raises:
        ShardTypeError: the program is not well-typed.
        TransformError: it is no mapped function, or asks for the value of a tensor.

    Source: the roofline of Williams et al. 2009; torch's `FlopCounterMode` and `MemTracker`.

    Example:
        >>> import torch
        >>> from shardmap_torch import I, P, ShapeDtype, all_reduce, make_mesh, shard_map
        >>> from shardmap_torch.planning import H100, estimate
        >>> mesh = make_mesh((8,), ("tp",), kind="abstract")
        >>> @shard_map(mesh=mesh, in_specs=(P(), P(None, "tp"), P("tp")), out_specs=P())
        ... def mlp(x, up, down):
        ...     return all_reduce((x @ up).relu() @ down, "tp", dst=I)
        >>> shapes = (8192, 4096), (4096, 16384), (16384, 4096)
        >>> args = [ShapeDtype(shape, torch.bfloat16) for shape in shapes]
        >>> plan = estimate(mlp, *args, hardware=H100)
        >>> plan.sent, round(plan.seconds * 1e6), plan.peak  # bytes, microseconds, bytes
        ({'tp': 117440512}, 698, 234881024)
        >>> plan.at_peak
        {'arguments': 100663296, 'forward': 67108864, 'backward': 0, 'messages': 67108864}
    """
    with postponing_full_collections():  # from one part to the next, too
        found = Estimate(dry_run(f, args, kwargs, hardware.counts), hardware)
        found.spans  # noqa: B018  # timed now: by processes, all of which are here
    return found


_KINDS: Final = (ARGUMENT, "forward", "backward", "messages")


def _kind(block: Block) -> str:
    if block.owner == ARGUMENT:
        return ARGUMENT
    if block.is_message:
        return "messages"
    return "backward" if block.backward else "forward"

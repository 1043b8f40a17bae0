"""Lays the steps of a run out in time, on two lanes of each rank: what it computes and sends."""

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from shardmap_torch.planning.dry_run import DryRun, Step
from shardmap_torch.planning.hardware import Hardware

COMPUTE: Final = "compute"
MESSAGES: Final = "messages"
"""The two lanes of a rank."""


@dataclass(frozen=True)
class Span:
    """A step in time.

    Attributes:
        step: the operator or collective.
        lane: where it runs, `COMPUTE` or `MESSAGES`.
        start: seconds after the start of the call.
        end: likewise.
    """

    step: Step
    lane: str
    start: float
    end: float


def schedule(run: DryRun, hardware: Hardware) -> tuple[list[Span], Mapping[str, float]]:
    """Lays steps out in time: operators one after the other, messages beside them if they may.

    A rank waits for a message unless it has begun it ahead of time; messages wait for one another.
    """
    hardware = hardware.on(run)
    computing = sending = 0.0
    computed = [0.0]  # after each number of steps
    spans: list[Span] = []
    exposed: defaultdict[str, float] = defaultdict(float)
    arrives: dict[int | None, float] = {}
    for step, late in zip(run.steps, hardware.overheads(run), strict=True):
        computing += late
        if not step.axes:
            lane, start, end = COMPUTE, computing, computing + hardware.seconds(step)
            computing = end
        elif step.waits:
            lane, start, end = COMPUTE, computing, max(computing, arrives[step.number])
        else:
            begins = computing if step.after is None else computed[step.after]
            start = max(begins, sending)
            lane, end = MESSAGES, start + hardware.sending(step, run.mesh)
            sending = arrives[step.number] = end
        spans.append(Span(step, lane, start, end))
        if step.axes and (step.waits or step.number is None or not hardware.hides):
            exposed[",".join(step.axes)] += end - computing
            computing = end
        computed.append(computing)
    return spans, exposed

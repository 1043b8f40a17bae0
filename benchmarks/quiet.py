"""Tells disturbed rounds from undisturbed ones, for two ranks that time things together."""

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist


def busy_seconds() -> float:
    """CPU seconds of all processes since boot, without interrupts, with time stolen by the host."""
    with open("/proc/stat") as stat:
        user, nice, system, _, _, _, _, steal = map(int, stat.readline().split()[1:9])
    return (user + nice + system + steal) / os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Mark:
    """A moment: the time, this process's CPU seconds, everyone's."""

    time: float
    own: float
    all: float

    @classmethod
    def now(cls) -> "Mark":
        return cls(time.time(), time.process_time(), busy_seconds())

    def others(self) -> float:
        """Cores that processes other than the ranks kept busy since; as rank 0 sees it."""
        ours = torch.tensor([time.process_time() - self.own], dtype=torch.float64)
        dist.all_reduce(ours)
        load = torch.tensor([(busy_seconds() - self.all - ours.item()) / (time.time() - self.time)])
        dist.broadcast(load, 0)
        return float(load)


def slowest(values: Mapping[str, float]) -> dict[str, float]:
    """The longest of the ranks' times."""
    merged = torch.tensor(list(values.values()), dtype=torch.float64)
    dist.all_reduce(merged, op=dist.ReduceOp.MAX)
    return dict(zip(values, merged.tolist(), strict=True))


def time_left(deadline: float) -> bool:
    """Rank 0's opinion, so that all ranks stop after the same round."""
    left = torch.tensor([time.time() < deadline])
    dist.broadcast(left, 0)
    return bool(left)

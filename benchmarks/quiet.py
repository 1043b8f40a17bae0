"""Two ranks that time things together: how they join, and which of their rounds are disturbed."""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@contextmanager
def joined() -> Iterator[tuple[int, dict[str, Any]]]:
    """Joins the ranks that `link.run_ranks` has started; yields this one's number, and options."""
    rank, store, options = sys.argv[1:]
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{store}",
        rank=int(rank),
        world_size=2,
        timeout=timedelta(seconds=60),
    )
    yield int(rank), json.loads(options)
    dist.destroy_process_group()


@dataclass(frozen=True)
class Limits:
    """The number of undisturbed rounds that are wanted, and the time for them."""

    rounds: int
    seconds: float
    max_load: float
    max_drift: float

    @staticmethod
    def add_to(parser: argparse.ArgumentParser, rounds: int, seconds: float) -> None:
        """Adds their flags, with these defaults."""
        parser.add_argument("--rounds", type=int, default=rounds, help="undisturbed rounds wanted")
        parser.add_argument("--seconds", type=float, default=seconds, help="time limit of rounds")
        parser.add_argument("--max-load", type=float, default=0.2, help="cores others may use")
        parser.add_argument("--max-drift", type=float, default=0.1, help="change of matmul speed")

    @classmethod
    def of(cls, flags: Mapping[str, Any]) -> "Limits":
        """Takes them out of parsed flags."""
        return cls(flags["rounds"], flags["seconds"], flags["max_load"], flags["max_drift"])

    def admit(self, others: float, drift: float) -> bool:
        """Returns whether nobody else used the cores, and their speed stayed the same."""
        return others <= self.max_load and drift <= self.max_drift


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

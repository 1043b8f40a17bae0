"""Counts the calls of functions that a training step makes, part by part, ours and by hand.

    python -m benchmarks.train_step.profile [--json]

Times of single functions mislead here: a profiler slows down small functions most, and cold caches
make each call cost several times what it costs in a loop. Counts are the same in each run. Measured
on torch's fake process group, of one rank of two, for a signature that has been checked.
"""

import json
import sys
from collections import Counter
from collections.abc import Mapping
from types import CodeType
from typing import Any, Final

import torch
import torch.distributed as dist
from rich.console import Console

from benchmarks.sheets import Sheet
from benchmarks.train_step import handwritten, ours
from benchmarks.train_step.setting import Setting, Step
from shardmap_torch.autodiff.gradients import _forward
from shardmap_torch.optim.zero import _Zero

PARTS: Final[dict[CodeType, str]] = {
    handwritten.loss.__code__: "forward",
    _forward.__code__: "forward",
    torch.autograd.grad.__code__: "backward",
    handwritten.Training._clip.__code__: "norm and optimizer",
    handwritten.Training._update.__code__: "norm and optimizer",
    _Zero.update.__code__: "norm and optimizer",
}
AROUND: Final = "around them"
NAMES: Final = ("forward", "backward", "norm and optimizer", AROUND)


def count(step: Step) -> Counter[str]:
    """Counts the calls of Python functions and builtins in one step, by the part they belong to."""
    calls: Counter[str] = Counter()
    stack = [AROUND]

    def note(frame: Any, event: str, argument: object) -> None:
        if event in ("call", "c_call"):
            calls[stack[-1]] += 1
        part = PARTS.get(frame.f_code)
        if part is not None and event == "call":
            stack.append(part)
        elif part is not None and event == "return":
            stack.pop()

    sys.setprofile(note)
    try:
        step()
    finally:
        sys.setprofile(None)
    return calls


def sheet(counts: Mapping[str, Mapping[str, int]]) -> Sheet:
    """Makes the table of calls by hand and ours."""
    columns = [counts["by hand"], counts["ours"]]
    rows = [(part, *(f"{column[part]:,}" for column in columns)) for part in NAMES]
    rows.append(("together", *(f"{sum(column.values()):,}" for column in columns)))
    title = "Calls of functions in a step"
    return Sheet(title, ("part", "by hand", "ours"), tuple(rows))


def main() -> None:
    """Counts, and prints a table or JSON."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    setting = Setting(64)
    steps = {"by hand": handwritten.make(setting), "ours": ours.make(setting)}
    counts: dict[str, Counter[str]] = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        counts[name] = count(step)
    if "--json" in sys.argv:
        print(json.dumps(counts))
    else:
        sheet(counts).show(Console())


if __name__ == "__main__":
    main()

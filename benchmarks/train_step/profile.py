"""Counts the calls of functions that a training step makes, part by part, ours and by hand.

    python -m benchmarks.train_step.profile [width]

Times of single functions mislead here: a profiler slows down small functions most, and cold caches
make each call cost several times what it costs in a loop. Counts are the same in each run. Measured
on torch's fake process group, of one rank of two, for a signature that has been checked.
"""

import sys
from collections import Counter
from types import CodeType
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.timing import show
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


def main() -> None:
    """Measures and prints."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    setting = Setting(int(sys.argv[1]) if len(sys.argv) > 1 else 64)
    steps = {"by hand": handwritten.make(setting), "ours": ours.make(setting)}
    counts = {}
    for name, step in steps.items():
        for _ in range(3):
            step()
        counts[name] = count(step)
    parts = ["forward", "backward", "norm and optimizer", AROUND]
    rows = [(part, *(f"{found[part]:,}" for found in counts.values())) for part in parts]
    rows.append(("together", *(f"{found.total():,}" for found in counts.values())))
    show("Calls of functions in a step", ("", *counts), rows)


if __name__ == "__main__":
    main()

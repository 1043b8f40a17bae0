"""The cost of comparing the ranks in a training step: the GPT example on two gloo processes.

    .venv/bin/python -m benchmarks.comparison [quadruples]

Two estimates, both in processor time, which does not count what other processes do:

- Direct: what a step spends in the code that compares, records and bounds waits, timed where it
  runs, when the processor's caches are as cold as the step leaves them. Each clock is read once
  before, to be warm, and its own time is taken off.
- Paired: whole steps of all threads, with the control of the run and without any, in the order
  with, without, without, with. A drift of the machine cancels within such a quadruple. The interval
  is that of the median of their differences, with 95 % confidence, by bootstrap.

What a step does for it is counted too: Python calls, which do not depend on the machine. The thread
that posts to the store runs once a second, in both; it is measured by itself.
"""

import random
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch

from examples.gpt import data, model
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from examples.gpt.step import sharded_step
from shardmap_torch import P, device_put, make_mesh
from shardmap_torch.backends.process_group import ProcessGroupBackend
from shardmap_torch.control import start as controls
from shardmap_torch.control.control import Control
from tests.faults.support.world import World
from tests.run.test_call_cost import num_calls

_ORDER: Final = (True, False, False, True)
_BOOTSTRAPS: Final = 2000
_MEASURED: Final = ("begin_call", "end_call", "check", "resolve", "begin")
"""The methods of the control that the fast path calls, waits for data apart."""


@dataclass(frozen=True)
class Measured:
    """Figures of one rank.

    Attributes:
        quadruples: processor and wall seconds of the steps of each, in the order of `_ORDER`.
        spent: seconds a step in the code that compares, and number of its calls.
        step: processor seconds of a step that was timed so.
        calls: Python calls of a step with the control, and without.
        board: processor seconds a second of the thread that posts.
    """

    quadruples: list[list[tuple[float, float]]]
    spent: float
    entries: float
    step: float
    calls: tuple[int, int]
    board: float


def training() -> Callable[[], None]:
    """Makes a function that does one step of the GPT example."""
    config = Config(parallel=Parallel.of("dp+tp+sp"))
    mesh = make_mesh((1, 2), ("dp", "tp"))
    optimizer = make_optimizer(config, 100)
    cuts = model.specs(config)
    params = device_put(model.init(config, 0, torch.float32), mesh, cuts)
    moments = device_put(optimizer.init(params), mesh, optimizer.specs(cuts))
    text = torch.tensor(list(data.load_text()))
    batch = device_put(data.sample_batch(text, config.length, 16, 0), mesh, P("dp"))
    step = sharded_step(mesh, config, optimizer)

    def do() -> None:
        nonlocal params, moments
        params, moments, loss = step(params, moments, batch)
        loss.item()

    return do


def measure(rank: int, quadruples: int) -> Measured:
    """Measures one rank; `rank` takes part."""
    do = training()
    for _ in range(4):  # the first ones check, and fill caches
        do()
    own = controls._CURRENT.control
    assert own is not None
    found = [
        [timed(do, own if compared else None) for compared in _ORDER] for _ in range(quadruples)
    ]
    calls = []
    for each in (own, None):
        controls._CURRENT.control = each
        calls.append(num_calls(do))
    controls._CURRENT.control = own
    spans, steps = Spans(own), max(20, quadruples // 2)
    cpu = time.process_time()
    with spans:
        for _ in range(steps):
            do()
    cpu = (time.process_time() - cpu) / steps
    return Measured(
        found, spans.spent / steps, spans.entries / steps, cpu, (calls[0], calls[1]), board_time()
    )


def timed(do: Callable[[], None], control: Control | None) -> tuple[float, float]:
    """Returns the processor and the wall seconds of a step with this control."""
    controls._CURRENT.control = control
    cpu, wall = time.process_time(), time.perf_counter()
    do()
    return time.process_time() - cpu, time.perf_counter() - wall


@dataclass
class Spans:
    """Times the fast path of the control, while it is entered."""

    control: Control
    spent: float = 0.0
    entries: int = 0
    _inside: bool = False
    _clock: float = 0.0
    _site: Any = field(default=None)

    def __enter__(self) -> None:
        """Replaces the methods by timed ones."""
        clock = time.thread_time
        pairs = sorted(-(clock() - clock()) for _ in range(2001))
        self._clock = pairs[1000]
        for name in _MEASURED:
            setattr(self.control, name, self._timed(getattr(self.control, name)))
        self._site = ProcessGroupBackend.site
        ProcessGroupBackend.site = self._timed(self._site)  # type: ignore[method-assign]

    def __exit__(self, *error: object) -> None:
        """Puts the methods back."""
        for name in _MEASURED:
            delattr(self.control, name)
        ProcessGroupBackend.site = self._site  # type: ignore[method-assign]

    def _timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.thread_time

        def run(*args: Any, **kwargs: Any) -> Any:
            if self._inside:
                return call(*args, **kwargs)
            self._inside = True
            clock()
            began = clock()
            try:
                return call(*args, **kwargs)
            finally:
                self.spent += clock() - began - self._clock
                self.entries += 1
                self._inside = False

        return run


def board_time() -> float:
    """Returns the processor seconds a second of the thread that posts to the store."""
    (thread,) = [each for each in threading.enumerate() if each.name == "shardmap board"]
    assert thread.ident is not None
    own = time.pthread_getcpuclockid(thread.ident)
    began = time.clock_gettime(own)
    time.sleep(5)
    return (time.clock_gettime(own) - began) / 5


def interval(differences: Sequence[float]) -> tuple[float, float, float]:
    """Returns the median and its interval of 95 % confidence."""
    draws = random.Random(0)
    medians = sorted(
        statistics.median(draws.choices(differences, k=len(differences)))
        for _ in range(_BOOTSTRAPS)
    )
    low, high = medians[_BOOTSTRAPS // 40], medians[-_BOOTSTRAPS // 40 - 1]
    return statistics.median(differences), low, high


def paired(quadruples: Sequence[Sequence[tuple[float, float]]], column: int) -> str:
    """Formats the median difference of paired steps, in per cent of a step without control."""
    times = [[each[column] for each in four] for four in quadruples]
    alone = statistics.median([t for _, b, c, _ in times for t in (b, c)])
    differences = [(a + d - b - c) / 2 / alone for a, b, c, d in times]
    middle, low, high = interval(differences)
    return f"{middle:+.2%} of {alone * 1e3:.1f} ms, 95 % interval {low:+.2%} to {high:+.2%}"


def main() -> None:
    """Prints both estimates, by rank."""
    quadruples = int(sys.argv[1]) if len(sys.argv) > 1 else 150
    world = World(2, timeout=600)
    try:
        world.start(measure, quadruples)
        outcomes = world.outcomes(3000)
    finally:
        world.close()
    for rank, outcome in enumerate(outcomes):
        if outcome.value is None:
            sys.exit(str(outcome))
        found: Measured = outcome.value
        print(
            f"rank {rank}\n"
            f"  direct: {found.spent * 1e6:.0f} us in {found.entries:.0f} entries a step, "
            f"{found.spent / found.step:.2%} of its processor time of {found.step * 1e3:.1f} ms\n"
            f"  paired, processor time: {paired(found.quadruples, 0)}\n"
            f"  paired, wall time: {paired(found.quadruples, 1)}\n"
            f"  calls a step: {found.calls[0]:,} compared, {found.calls[1]:,} alone\n"
            f"  the thread that posts: {found.board * 1e3:.2f} ms a second"
        )


if __name__ == "__main__":
    main()

"""Tables of what was measured, for the terminal and for docs/benchmarks.md."""

import os
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import shardmap_torch


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of ratios, each taken within one round."""

    low: float
    median: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) < 2:
            return cls(values[0], values[0], values[0])
        return cls(*statistics.quantiles(values, n=4))

    def __str__(self) -> str:
        """Writes median and quartiles: `1.05 (1.03 to 1.08)`."""
        return f"{self.median:.2f} ({self.low:.2f} to {self.high:.2f})"


def ratios(samples: Sequence[Sequence[float]], base: Sequence[Sequence[float]], at: int) -> Spread:
    """Returns the ratios of one clock: 0 is wall time, 1 the processor's."""
    return Spread.of([one[at] / other[at] for one, other in zip(samples, base, strict=True)])


@dataclass(frozen=True)
class Sheet:
    """A table of a report."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def show(self, console: Console) -> None:
        """Prints it."""
        table = Table(title=self.title, title_justify="left")
        for at, column in enumerate(self.columns):
            table.add_column(column, justify="right" if at else "left")
        for row in self.rows:
            table.add_row(*row)
        console.print(table)

    def markdown(self) -> str:
        """Writes the table as a section of a page."""
        lines = [self.columns, tuple("---" for _ in self.columns), *self.rows]
        table = "\n".join("| " + " | ".join(line) + " |" for line in lines)
        return f"## {self.title}\n\n{table}\n"


def step_sheet(measured: Sequence[Mapping[str, object]]) -> Sheet:
    """The training step, by width: each contestant as a multiple of the first, in each round."""
    rows = []
    for each in measured:
        samples = each["samples"]
        assert isinstance(samples, dict)
        base = next(iter(samples.values()))
        for name, rounds in samples.items():
            milliseconds = 1e3 * statistics.median(taken[1] for taken in rounds)
            wall, processor = (str(ratios(rounds, base, at)) for at in (0, 1))
            rows.append((str(each["width"]), name, wall, processor, f"{milliseconds:.1f}"))
    columns = ("width", "step", "wall time", "processor time", "processor ms a rank")
    return Sheet("A training step", columns, tuple(rows))


def overhead_sheet(measured: Mapping[str, Sequence[Sequence[float]]]) -> Sheet:
    """Collectives and the boundary, in processor time, beside code written by hand."""
    rows = tuple(
        (
            name,
            f"{1e6 * statistics.median(first for first, _ in pairs):.0f}",
            f"{1e6 * statistics.median(second for _, second in pairs):.0f}",
            str(Spread.of([second / first for first, second in pairs])),
        )
        for name, pairs in measured.items()
    )
    return Sheet("Overhead of software", ("", "by hand, us", "ours, us", "ratio"), rows)


def header(rounds: int, number: int) -> Iterator[str]:
    """Versions, machine and method."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    now = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
    yield f"- Measured on {now} by `python -m benchmarks.train_step`."
    python, version = platform.python_version(), shardmap_torch.__version__
    yield f"- shardmap_torch {version}, torch {torch.__version__}, Python {python}."
    yield (
        f"- {_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
        f"load averages {load}. Where the load is above 1 other work ran beside: read ratios of "
        "processor time."
    )
    yield (
        f"- 2 processes on gloo, one thread each; {rounds} rounds of {number} steps, interleaved, "
        "every other round in reverse order. Ratios are taken within a round: median (quartiles)."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""Tables of what was measured, for the terminal and for the docs; does nothing when run."""

import os
import platform
import statistics
from collections.abc import Iterator, Sequence
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
        """Prints it; all columns but the first are figures."""
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


def machine(command: str) -> Iterator[str]:
    """When, with what and on what a command has measured."""
    load = ", ".join(f"{each:.1f}" for each in os.getloadavg())
    now = f"{datetime.now(UTC):%Y-%m-%d}"
    yield f"- Measured on {now} by `{command}`."
    python, version = platform.python_version(), shardmap_torch.__version__
    yield f"- shardmap_torch {version}, torch {torch.__version__}, Python {python}."
    yield (
        f"- {_processor()}, {os.cpu_count()} cores, {platform.system()} {platform.release()}; "
        f"load averages {load}. Where the load is above 1 other work ran beside: read ratios of "
        "processor time."
    )


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.machine()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()

"""Tables of a training step and of what software costs."""

import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from benchmarks.sheets import Sheet, Spread, machine, ratios

COMPILED: Final = "(compiled)"
"""End of the names of compiled contestants."""


def step_sheet(title: str, measured: Sequence[Mapping[str, object]]) -> Sheet:
    """The training step, by width: each contestant as a multiple of the first, in each round.

    Of the first that is compiled, if it is compiled itself.
    """
    rows = []
    for each in measured:
        samples = each["samples"]
        assert isinstance(samples, dict)
        for name, rounds in samples.items():
            alike = [each for each in samples if each.endswith(COMPILED) == name.endswith(COMPILED)]
            base = samples[alike[0]]
            milliseconds = 1e3 * statistics.median(taken[1] for taken in rounds)
            wall, processor = (str(ratios(rounds, base, at)) for at in (0, 1))
            rows.append((str(each["width"]), name, wall, processor, f"{milliseconds:.1f}"))
    columns = ("width", "step", "wall time", "processor time", "processor ms a rank")
    return Sheet(title, columns, tuple(rows))


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
    yield from machine("python -m benchmarks.train_step")
    yield (
        f"- 2 processes on gloo, one thread each; {rounds} rounds of {number} steps, interleaved, "
        "every other round in reverse order. Ratios are taken within a round: median (quartiles)."
    )

"""Times functions against each other, and prints the table; does nothing when run."""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

from rich.console import Console

from benchmarks.sheets import Sheet


def compare(
    functions: Mapping[str, Callable[[], object]],
    rounds: int = 30,
    number: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, float]:
    """Median seconds of a call, by name; the first function is the one to compare with.

    Each round times `number` calls of every function, every other round backwards, so that none
    always follows the same one. Of all but the first the median is taken of the ratio to the first
    in the same round: a machine that is twice as slow for some rounds then changes no ratio.
    Two rounds before these warm up. With `clock=time.process_time` other processes do not count.
    """
    seconds: dict[str, list[float]] = {name: [] for name in functions}
    for turn in range(rounds + 2):
        for name in list(functions)[:: 1 if turn % 2 else -1]:
            taken = _time(functions[name], number, clock)
            if turn >= 2:
                seconds[name].append(taken)
    first = next(iter(seconds.values()))
    return {name: statistics.median(first) * _ratio(each, first) for name, each in seconds.items()}


def _ratio(seconds: Sequence[float], base: Sequence[float]) -> float:
    return statistics.median(a / b for a, b in zip(seconds, base, strict=True))


def _time(function: Callable[[], object], number: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(number):
        function()
    return (clock() - start) / number


def verdict(ratio: float, target: float) -> str:
    """A cell that tells the target and whether it is met."""
    return f"{target:g}x: {'met' if ratio <= target else 'missed'}"


def show(title: str, columns: Sequence[str], rows: Sequence[tuple[str, ...]]) -> None:
    """Prints a table."""
    Sheet(title, tuple(columns), tuple(rows)).show(Console())

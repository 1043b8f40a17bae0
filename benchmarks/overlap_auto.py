"""Measures that `overlap="auto"` is not slower than the composition where overlap cannot pay.

    .venv/bin/python -m benchmarks.overlap_auto                  # rate-limited links need root
    .venv/bin/python -m benchmarks.overlap_auto --links loopback

Two gloo ranks of one thread, over loopback (nothing to hide: the cores that multiply move the
bytes) and over veth pairs limited to two rates. Shapes from one row to communication-bound and
compute-bound layers; the forward alone, and the forward with both gradients. In each round the
composition, `auto` and the composition again, as a control, run in turn, there and back, in pieces
of at least 10 ms. Rounds are rejected in which other processes used more than --max-load cores or
the composition's speed changed by more than --max-drift. Ratios are of times in the same round:
their median, and the middle half of them; the control's tells how far a median can be trusted.
Where `auto` runs the composition, what it adds is work of the CPU: so the CPU seconds of rank 0 are
compared as well, over all rounds, which needs no quiet machine.
"""

import argparse
import signal
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass

from benchmarks.link import LOOPBACK, CannotRunError, Link, run_ranks, two_namespaces
from benchmarks.quiet import Limits

TARGET = 1.03

SHAPES = {  # Rows of a rank's block, inner size, columns of a column layer; others mirror it.
    "one row": (1, 64, 64),
    "too few rows": (64, 256, 256),
    "fewest rows": (128, 128, 128),
    "small": (256, 512, 512),
    "balanced": (1024, 512, 1024),
    "communication": (1024, 1024, 64),
    "computation": (256, 1024, 4096),
}


@dataclass(frozen=True)
class Outcome:
    """The rounds of one case: the undisturbed ones, and the CPU seconds of all."""

    name: str
    plan: str
    rounds: Sequence[Mapping[str, float]]
    cpu: Sequence[Mapping[str, float]]

    @property
    def overlapped(self) -> bool:
        return self.plan != "composition"

    @property
    def ratio(self) -> float:
        """Divides times where there are any, else CPU seconds."""
        return median_ratio(self.rounds or self.cpu, "auto")

    def __str__(self) -> str:
        line = f"  {self.name:52} {self.plan:17}"
        line += f" {median_ratio(self.cpu, 'auto'):6.3f}x {median_ratio(self.cpu, 'control'):6.3f}x"
        if self.rounds:
            ordered = sorted(each["auto"] / each["composition"] for each in self.rounds)
            quarter = len(ordered) // 4
            seconds = statistics.median(each["composition"] for each in self.rounds)
            line += f" | {seconds * 1e3:8.2f} ms {statistics.median(ordered):6.3f}x"
            line += f"  {ordered[quarter]:.3f} to {ordered[-1 - quarter]:.3f}"
            line += f" {median_ratio(self.rounds, 'control'):6.3f}x"
        return line + f"  {len(self.rounds)} of {len(self.cpu)}"


HEADER = (
    f"  {'':52} {'auto ran':17} CPU: auto control | composition    auto  middle half   control"
    "  rounds"
)


def median_ratio(rounds: Sequence[Mapping[str, float]], name: str) -> float:
    """To the composition in the same round."""
    return statistics.median(each[name] / each["composition"] for each in rounds)


def opened(link: str, burst: str) -> AbstractContextManager[Link]:
    return nullcontext(LOOPBACK) if link == "loopback" else two_namespaces(link, burst)


def summary(outcomes: Sequence[Outcome]) -> Iterator[str]:
    """The worst case of each kind."""
    kinds = {"ran the composition": False, "overlapped": True}
    for kind, overlapped in kinds.items():
        cases = [outcome for outcome in outcomes if outcome.overlapped == overlapped]
        if cases:
            worst = max(cases, key=lambda each: each.ratio)
            above = sum(each.ratio > TARGET for each in cases)
            yield (
                f"{len(cases)} cases in which auto {kind}: {above} above {TARGET}x, "
                f"the worst {worst.ratio:.3f}x ({worst.name})"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--links", default="loopback,500mbit,2gbit", help="loopback, or tbf rates")
    parser.add_argument("--burst", default="256kb", help="bucket of tbf")
    Limits.add_to(parser, rounds=9, seconds=4.0)  # of a case
    args = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # Clean up when killed, too.
    options = {"shapes": SHAPES, **asdict(Limits.of(vars(args)))}
    limit = 2 * 3 * len(SHAPES) * (args.seconds + 5)
    outcomes: list[Outcome] = []
    for name in args.links.split(","):
        try:
            with opened(name, args.burst) as link:
                result = run_ranks(link, "benchmarks.overlap_auto_rank", options, limit)
        except CannotRunError as error:
            print(f"no link of {name}: {error}")
            continue
        cases = [Outcome(**case) for case in result]
        outcomes += cases
        print(name, HEADER, *cases, sep="\n", flush=True)
    print("\n".join(summary(outcomes)))


if __name__ == "__main__":
    main()

"""Measures calls and a simulated MLP beside all peers, in one run; writes docs/peers.md and a plot.

    python -m benchmarks.peers [--rounds 11] [--jax PYTHON] [--out FOLDER]

`make bench` makes an environment with JAX, whose Python `--jax` names; without one JAX is left out.
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib import pyplot
from rich.console import Console

from benchmarks.peers.problem import FORWARD, GRADIENTS, LEAVES, call_of
from benchmarks.peers.serving import Peer
from benchmarks.sheets import Sheet, machine, ratios

ROOT: Final = Path(__file__).resolve().parents[2]
BASES: Final = dict.fromkeys(map(call_of, LEAVES), "local_map") | dict.fromkeys(
    (FORWARD, GRADIENTS), "torch, unsharded"
)
"""The contestant that the others are compared with, by case."""
SAMPLE: Final = 0.02  # seconds, of as many calls as fit in
Samples = dict[str, list[tuple[float, float]]]

INTRODUCTION: Final = """# Calls and an MLP, beside other libraries

The same small problems in shardmap_torch, in PyTorch's own ways and in JAX, each in a process of
its own on the CPU, one after the other. *A call* is the identity function of a number of tensors
(leaves) of 8 numbers, on one rank: DTensors for `local_map` and ours, arrays for JAX. *The MLP*
is relu(x @ w1) @ w2 with x [64, 512] and 2048 hidden features in float32, tensor-parallel over 8
ranks that are simulated in one process: by vmap or by threads (ours), as DTensors under torch's
LocalTensorMode, or on 8 host devices (JAX). Results are compared before anything is timed. A
jitted function of JAX is compiled before it is timed, and takes no other shapes.
"""


def parse(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """Reads the flags."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=11)
    parser.add_argument("--jax", type=Path, default=ROOT / ".venv-jax" / "bin" / "python")
    parser.add_argument("--out", type=Path, default=ROOT / "docs")
    return parser.parse_args(arguments)


def start(jax: Path) -> list[Peer]:
    """Starts a process for each library."""
    peers = [Peer(sys.executable, "torch_peers"), Peer(sys.executable, "local_tensor")]
    return [*peers, Peer(str(jax), "jax_peer")] if jax.exists() else peers


def measure(peers: Sequence[Peer], case: str, rounds: int) -> Samples:
    """Times every contestant in each round, every other round in reverse order."""
    entrants = {name: peer for peer in peers for each, name in peer.cases if each == case}
    _compare_totals(case, {name: peer.total(case, name) for name, peer in entrants.items()})
    numbers = {}
    for name, peer in entrants.items():
        once = min(peer.time(case, name, 1)[0] for _ in range(3))  # warm from the second on
        numbers[name] = max(1, min(100, int(SAMPLE / once)))
    samples: Samples = {name: [] for name in entrants}
    for turn in range(rounds):
        for name in list(entrants)[:: 1 if turn % 2 else -1]:
            samples[name].append(entrants[name].time(case, name, numbers[name]))
    return samples


def _compare_totals(case: str, totals: dict[str, float]) -> None:
    first = next(iter(totals.values()))
    wrong = {name: each for name, each in totals.items() if abs(each - first) > 1e-5 * abs(first)}
    if wrong:
        raise SystemExit(f"{case}: results add up to {first}, but {wrong}")


def sheet(case: str, samples: Samples) -> Sheet:
    """Makes the table of a case."""
    base = samples[BASES[case]]
    rows = tuple(
        (
            name,
            f"{1e6 * statistics.median(wall for wall, _ in taken):,.0f}",
            str(ratios(taken, base, 0)),
            str(ratios(taken, base, 1)),
        )
        for name, taken in samples.items()
    )
    of = f"of {BASES[case]}"
    columns = ("", "us", f"wall time, {of}", f"processor time, {of}")
    return Sheet(case[0].upper() + case[1:], columns, rows)


def draw(measured: dict[str, Samples], file: Path) -> None:
    """Draws the wall time of each contestant, as a multiple of the base of its case."""
    figure, plots = pyplot.subplots(len(measured), 1, figsize=(8, 2 * len(measured)))
    for plot, (case, samples) in zip(plots, measured.items(), strict=True):
        spreads = {name: ratios(taken, samples[BASES[case]], 0) for name, taken in samples.items()}
        medians = [each.median for each in spreads.values()]
        bars = plot.barh(list(spreads), medians)
        plot.bar_label(bars, [f"{each:.2f}x" for each in medians], padding=3)
        plot.set_xscale("log")
        plot.set_title(f"{case}, of {BASES[case]}", loc="left", fontsize=10)
        plot.invert_yaxis()
        plot.margins(x=0.2)
    figure.tight_layout()
    figure.savefig(file, dpi=100)


def main() -> None:
    """Measures, prints and writes."""
    options = parse()
    peers = start(options.jax)
    try:
        measured = {case: measure(peers, case, options.rounds) for case in BASES}
    finally:
        for peer in peers:
            peer.close()
    about = "\n".join(
        [
            *machine("python -m benchmarks.peers"),
            f"- Beside it {', '.join(dict.fromkeys(peer.version for peer in peers))}.",
            f"- One thread; {options.rounds} rounds, interleaved. Ratios are taken within a round: "
            "median (quartiles).",
        ]
    )
    console = Console()
    console.print(about, markup=False, highlight=False)
    sheets = [sheet(case, samples) for case, samples in measured.items()]
    for each in sheets:
        each.show(console)
    draw(measured, options.out / "peers.png")
    tables = [each.markdown() for each in sheets]
    parts = [INTRODUCTION, about + "\n", *tables, "![wall time beside the peers](peers.png)\n"]
    (options.out / "peers.md").write_text("\n".join(parts))
    console.print(f"wrote {options.out / 'peers.md'}", markup=False, highlight=False)


if __name__ == "__main__":
    main()

"""Models of transformers as they are, parallelized: time, bytes and memory, beside torch.

    .venv/bin/python -m benchmarks.transformers_models [names]

A forward and a backward of models with random weights, of two layers, 256 features and 8 heads,
on four sequences of 128 tokens, in float32: later calls, which are checked no more. Two simulated
ranks stand beside the same model on one device; two gloo processes beside torch's
`parallelize_module` by the same plan, where that has only styles that torch knows. Medians of
ratios of interleaved rounds. Bytes are what a rank sends forward and backward by the checker's
account; memory is that of a rank's parameters.
"""

import copy
import json
import sys
from collections.abc import Callable
from typing import Any, Final

import torch
from rich.console import Console

from benchmarks.link import LOOPBACK, run_ranks
from benchmarks.sheets import Sheet
from benchmarks.timing import compare
from benchmarks.transformers_rank import ROUNDS, make, training
from shardmap_torch import explain, make_mesh, parallelize
from tests.parallel.support.transformers_models import CONFIGS


def simulated(name: str) -> tuple[dict[str, float], int]:
    """Returns seconds on one device and on two simulated ranks, and the bytes that a rank sends."""
    one, batch = make(name)
    ours = parallelize(copy.deepcopy(one), make_mesh((2,), ("tp",), kind="simulated"))
    sent = sum(explain(ours, **batch).bytes_sent.values())
    calls: dict[str, Callable[[], object]] = {
        "one": training(one, batch),
        "ours": training(ours, batch),
    }
    return compare(calls, ROUNDS), sent


def row(name: str, port: int) -> tuple[str, ...]:
    """Measures a model."""
    taken, sent = simulated(name)
    found: Any = run_ranks(LOOPBACK, "benchmarks.transformers_rank", {"name": name}, 200, port)
    times, memory = found["seconds"], found["memory"]
    torchs = times.get("torch")
    return (
        name,
        f"{taken['one'] * 1e3:.0f} ms",
        f"{taken['ours'] / taken['one']:.2f}x",
        f"{times['ours'] * 1e3:.0f} ms",
        "-" if torchs is None else f"{times['ours'] / torchs:.2f}x",
        f"{sent / 1e6:.1f} MB",
        f"{memory['ours'] / 1e6:.1f} of {memory['one'] / 1e6:.1f} MB",
        f"{memory['torch'] / 1e6:.1f} MB" if "torch" in memory else found["why"],
    )


COLUMNS: Final = (
    "model",
    "one device",
    "2 simulated ranks",
    "2 processes",
    "of parallelize_module",
    "sent by a rank",
    "parameters of a rank",
    "with parallelize_module",
)


def main() -> None:
    torch.set_num_threads(1)
    names = sys.argv[1:] or list(CONFIGS)
    rows = []
    for at, name in enumerate(names):
        rows.append(row(name, 29600 + at))
        print(json.dumps(rows[-1]), file=sys.stderr, flush=True)
    sheet = Sheet("A forward and a backward of a later call", COLUMNS, tuple(rows))
    sheet.show(Console())
    print(sheet.markdown())


if __name__ == "__main__":
    main()

"""Measures what comparing processes costs: empty calls, and steps of the GPT example.

    python -m benchmarks.comparing [--calls-of 4] [--steps-of 2] [--rounds 60]

The same processes run calls with comparisons and without, in blocks that take turns; what differs
is the cost. An empty call is the identity of two tensors of 8 numbers: DTensors, of which samples
are compared every 100 calls, and plain tensors, compared in each call. The goals are 80 us of
processor time for comparing an empty call on 4 ranks, and 1 % of the step on 2.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from benchmarks.timing import show
from benchmarks.train_step import ours
from benchmarks.train_step.setting import Setting
from shardmap_torch import P, device_put, make_mesh, shard_map
from shardmap_torch.control import start

CALLS: Final = 200
"""Empty calls a block: twice as many as there are between comparisons of all bits."""

STEPS: Final = 3
WIDTHS: Final = 64, 256

Block = Callable[[], object]


@contextmanager
def not_comparing() -> Iterator[None]:
    """Runs calls as a process does that has no others to compare with."""
    control, start._CURRENT.control = start._CURRENT.control, None
    try:
        yield
    finally:
        start._CURRENT.control = control


def timed(block: Block) -> list[float]:
    """Runs it on all ranks; returns processor and wall seconds, the mean of the ranks."""
    dist.barrier()
    wall, processor = time.perf_counter(), time.process_time()
    block()
    taken = [time.process_time() - processor, time.perf_counter() - wall]
    mean = torch.tensor(taken, dtype=torch.float64) / dist.get_world_size()
    dist.all_reduce(mean)
    return mean.tolist()


def measure(block: Block, rounds: int) -> list[list[list[float]]]:
    """Returns processor and wall seconds of a block with comparisons, and without, by round.

    The two take turns; two rounds before warm up.
    """
    found = []
    for turn in range(rounds + 2):
        pair: list[list[float]] = [[], []]
        for compares in (True, False)[:: 1 if turn % 2 else -1]:
            if compares:
                pair[0] = timed(block)
            else:
                with not_comparing():
                    pair[1] = timed(block)
        found.append(pair)
    return found[2:]


def repeated(function: Callable[[], object], number: int) -> None:
    for _ in range(number):
        function()


def calls() -> Mapping[str, tuple[Block, int]]:
    """Empty calls, and how many are in a block."""
    mesh = make_mesh((dist.get_world_size(),), ("tp",))

    def identity(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return x, y

    spec, plain = P("tp"), torch.ones(8)
    f = shard_map(identity, mesh=mesh, in_specs=spec, out_specs=spec)
    sharded = device_put(plain, mesh, spec)
    kinds = {
        "two DTensors": (sharded, sharded),
        "a DTensor, a plain tensor": (sharded, plain),
        "two plain tensors": (plain, plain.clone()),
    }
    return {
        f"an empty call of {name}": (partial(repeated, partial(f, *xs), CALLS), CALLS)
        for name, xs in kinds.items()
    }


def steps() -> Mapping[str, tuple[Block, int]]:
    """Steps of the GPT example."""
    return {
        f"a step of the GPT example, width {width}": (
            partial(repeated, ours.make(Setting(width)), STEPS),
            STEPS,
        )
        for width in WIDTHS
    }


MAKE: Final = {"calls": calls, "steps": steps}


def run(rank: int, size: int, kind: str, rounds: int, folder: str) -> None:
    """Measures on one rank; the first one saves what it finds."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=size)
    found: dict[str, Any] = {}
    for name, (block, number) in MAKE[kind]().items():
        found[name] = torch.tensor(measure(block, rounds)) / number
    if rank == 0:
        torch.save(found, f"{folder}/found")
    dist.destroy_process_group()


def rows(size: int, kind: str, rounds: int) -> Sequence[tuple[str, ...]]:
    """Starts the ranks; describes medians over the rounds."""
    with TemporaryDirectory() as folder:
        spawn(run, (size, kind, rounds, folder), nprocs=size)
        found = torch.load(f"{folder}/found")
    table = []
    for name, taken in found.items():
        for at, clock in enumerate(("processor", "wall")):
            compared, alone = taken[:, 0, at], taken[:, 1, at]
            differences = (compared - alone).tolist()
            more, base = statistics.median(differences), alone.median().item()
            cost = f"{more * 1e6:+.1f} us", f"{100 * more / base:+.2f} %"
            table.append((f"{name}, {size} ranks", clock, f"{base * 1e6:.1f} us", *cost))
    return table


def main() -> None:
    """Measures both, or one of them if the other has no ranks."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--calls-of", type=int, default=4)
    parser.add_argument("--steps-of", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=60)
    options = parser.parse_args()
    table: list[tuple[str, ...]] = []
    for size, kind in ((options.calls_of, "calls"), (options.steps_of, "steps")):
        table += rows(size, kind, options.rounds) if size else []
    show("Comparing", ("", "time", "without", "added", ""), table)


if __name__ == "__main__":
    main()

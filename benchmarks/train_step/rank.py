"""A rank of the measurement: makes the contestants, compares their results, times them."""

import json
import sys
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Final

import torch
import torch.distributed as dist

from benchmarks.train_step import compiled, handwritten, modules, ours, simulated
from benchmarks.train_step.setting import Setting, Step

ON_PROCESSES: Final[Mapping[str, Callable[[Setting], Step]]] = {
    "by hand": handwritten.make,
    "ours": ours.make,
    "ours (replayed)": partial(ours.make, replay=True),
    "parallelize_module": modules.make,
    "by hand (compiled)": compiled.by_hand,
    "ours (compiled)": partial(ours.make, compiles=True),
}

CONTESTANTS: Final[Mapping[str, Callable[[Setting], Step]]] = {**ON_PROCESSES, **simulated.MADE}

Samples = dict[str, list[list[float]]]
"""Wall and processor seconds of a step, by contestant and round, the mean of the ranks."""


def compare_losses(steps: Mapping[str, Step], num_steps: int = 3) -> None:
    """Requires that all contestants train alike; these steps also warm up."""
    losses = {name: [step().item() for _ in range(num_steps)] for name, step in steps.items()}
    expected = torch.tensor(next(iter(losses.values())))
    for name, found in losses.items():
        # float32, some hundred roundings in a row: 1e-4 of the loss is far below a wrong gradient.
        told = partial("{}: {}".format, name)
        torch.testing.assert_close(torch.tensor(found), expected, rtol=1e-4, atol=0, msg=told)


def measure(steps: Mapping[str, Step], rounds: int, number: int) -> Samples:
    """Times `number` steps of each contestant a round, every other round in reverse order."""
    samples: Samples = {name: [] for name in steps}
    for turn in range(rounds):
        for name in list(steps)[:: 1 if turn % 2 else -1]:
            dist.barrier()
            wall, processor = time.perf_counter(), time.process_time()
            for _ in range(number):
                steps[name]()
            taken = [time.perf_counter() - wall, time.process_time() - processor]
            mean = torch.tensor(taken, dtype=torch.float64) / number / dist.get_world_size()
            dist.all_reduce(mean)
            samples[name].append(mean.tolist())
    return samples


def main() -> None:
    """Arguments: rank, number of ranks, store, widths, rounds, steps a round, names; or all."""
    rank, num_ranks, rounds, number = map(int, sys.argv[1:5])
    store, widths, names = sys.argv[5], sys.argv[6], sys.argv[7]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"file://{store}", rank=rank, world_size=num_ranks)
    chosen = names.split(",")
    for width in map(int, widths.split(",")):
        setting = Setting(width)
        steps = {name: CONTESTANTS[name](setting) for name in chosen}
        compare_losses(steps)
        samples = measure(steps, rounds, number)
        if rank == 0:
            print(json.dumps({"width": width, "samples": samples}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The cost of comparing the ranks in a training step: the GPT example on two gloo processes.

    .venv/bin/python benchmarks/comparison.py [rounds]

Steps with the comparison of calls (the default) and without any control of the run take turns, so
that both see the same machine. CPU time is that of all threads of a process, the ones that exchange
hashes and post to the store included; it does not count waiting, in which other processes run.
"""

import statistics
import sys
import time
from pathlib import Path
from typing import Final

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from examples.gpt import data, model
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from examples.gpt.step import sharded_step
from shardmap_torch import P, device_put, make_mesh
from shardmap_torch.control import start as controls
from tests.faults.support.world import World

_STEPS: Final = 4


def measure(rank: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """CPU and wall seconds a step, by round; `rank` takes part."""
    config = Config(parallel=Parallel.of("dp+tp+sp"))
    mesh = make_mesh((1, 2), ("dp", "tp"))
    optimizer = make_optimizer(config, 100)
    cuts = model.specs(config)
    params = device_put(model.init(config, 0, torch.float32), mesh, cuts)
    moments = device_put(optimizer.init(params), mesh, optimizer.specs(cuts))
    text = torch.tensor(list(data.load_text()))
    batch = device_put(data.sample_batch(text, config.length, 16, 0), mesh, P("dp"))
    step = sharded_step(mesh, config, optimizer)
    own = controls._CURRENT.control
    found: dict[str, list[tuple[float, float]]] = {"compared": [], "alone": []}
    for number in range(2 * rounds + 4):
        name = "compared" if number % 2 == 0 else "alone"
        controls._CURRENT.control = own if name == "compared" else None
        cpu, wall = time.process_time(), time.perf_counter()
        for _ in range(_STEPS):
            params, moments, loss = step(params, moments, batch)
            loss.item()
        if number >= 4:  # the first ones check, and fill caches
            taken = time.process_time() - cpu, time.perf_counter() - wall
            found[name].append((taken[0] / _STEPS, taken[1] / _STEPS))
    controls._CURRENT.control = own
    return found


def main() -> None:
    """Prints the medians of both, and of the ratios of neighbours."""
    rounds = int(sys.argv[1]) if len(sys.argv) > 1 else 30
    world = World(2, timeout=600)
    try:
        world.start(measure, rounds)
        outcomes = world.outcomes(3000)
    finally:
        world.close()
    for rank, outcome in enumerate(outcomes):
        if outcome.value is None:
            sys.exit(str(outcome))
        for column, what in enumerate(("CPU", "wall")):
            with_it, without = (
                [each[column] for each in outcome.value[name]] for name in ("compared", "alone")
            )
            ratios = [a / b - 1 for a, b in zip(with_it, without, strict=True)]
            print(
                f"rank {rank}, {what}: {statistics.median(with_it) * 1e3:.1f} ms compared, "
                f"{statistics.median(without) * 1e3:.1f} ms alone; medians "
                f"{statistics.median(with_it) / statistics.median(without) - 1:+.2%}, "
                f"of neighbours {statistics.median(ratios):+.2%}"
            )


if __name__ == "__main__":
    main()

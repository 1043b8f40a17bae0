"""Measures a whole training step with overlapped layers, over a rate-limited link.

    .venv/bin/python -m benchmarks.overlap_step [--rate 500mbit] [--rounds 9]    # needs root

The step of examples/gpt, tensor and sequence parallel over two gloo ranks in network namespaces of
their own, with `overlap` "off", "auto" and "require", at its default sizes and at four times their
width. They take turns, every other round in reverse order; wall times of a step are given as
multiples of two others, medians over the rounds.
"""

import argparse
import json
import statistics
import sys
import time
from typing import Any, Final

import torch
import torch.distributed as dist

from benchmarks.link import CannotRunError, run_ranks, two_namespaces
from benchmarks.quiet import joined
from examples.gpt import model
from examples.gpt.optim import make_optimizer
from examples.gpt.step import sharded_step
from shardmap_torch import P, device_put, make_mesh

CHOICES: Final = ("off", "auto", "require")
WIDER: Final = {"width": 512, "hidden": 1536, "length": 128}
SIZES: Final[dict[str, dict[str, Any]]] = {"default sizes": {}, "width 512, length 128": WIDER}


def rank(options: dict[str, Any]) -> None:
    """Times the steps on one rank; the first prints seconds by choice and round."""
    mesh = make_mesh((1, 2), ("dp", "tp"))
    steps: dict[str, Any] = {}
    for overlap in CHOICES:
        config = model.Config(overlap=overlap, **SIZES[options["sizes"]])
        optimizer, specs = make_optimizer(config, 1000, 20), model.specs(config)
        params = model.init(config)
        state = device_put(optimizer.init(params), mesh, optimizer.specs(specs))
        params = device_put(params, mesh, specs)
        tokens = torch.randint(config.vocabulary, (16, config.length + 1))
        batch = device_put(tokens, mesh, P("dp"))
        steps[overlap] = sharded_step(mesh, config, optimizer), (params, state, batch)
    taken: dict[str, list[float]] = {overlap: [] for overlap in CHOICES}
    for turn in range(-2, options["rounds"]):
        for overlap in CHOICES[:: 1 if turn % 2 else -1]:
            step, arguments = steps[overlap]
            dist.barrier()
            start = time.perf_counter()
            step(*arguments)
            dist.barrier()
            if turn >= 0:
                taken[overlap].append(time.perf_counter() - start)
    if dist.get_rank() == 0:
        print(json.dumps(taken), flush=True)


def main() -> None:
    """Starts both ranks, and prints the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rate", default="500mbit")
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    for sizes in SIZES:
        told = {"rounds": options.rounds, "sizes": sizes}
        try:
            with two_namespaces(options.rate, "256kb") as link:
                taken = run_ranks(link, "benchmarks.overlap_step", told, 120)
        except CannotRunError as error:
            raise SystemExit(f"benchmarks/overlap_step.py cannot run here: {error}") from error
        print(f"{sizes}, {options.rate}")
        for overlap, seconds in taken.items():
            off, require = (_ratio(seconds, taken[other]) for other in ("off", "require"))
            print(f"  {overlap:8} {1e3 * statistics.median(seconds):7.1f} ms", end="")
            print(f"  {off:.2f}x of off  {require:.2f}x of require")


def _ratio(seconds: list[float], others: list[float]) -> float:
    return statistics.median(own / other for own, other in zip(seconds, others, strict=True))


if __name__ == "__main__":
    if sys.argv[1:2] in (["0"], ["1"]):
        with joined() as (_, told):
            rank(told)
    else:
        main()

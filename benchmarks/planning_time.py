"""Compares the estimated time of steps with what they take on 1, 2 and 4 processes of this machine.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planning_time

The cases are those of `planning_memory`, and MLPs. Every case is estimated before and after it is
measured; one whose estimates differ by more than a fifth is marked as disturbed. Steps take
the median of several turns. Prints the ratio of each, how many are within 20 %, and the rank
correlation of estimated and measured times.
"""

import subprocess
import sys
import time
from collections.abc import Iterator
from statistics import median
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import planning_memory
from benchmarks.planning_memory import Built, Case
from shardmap_torch import I, Mesh, P, all_reduce, device_put, make_mesh, shard_map, value_and_grad
from shardmap_torch.optim import sync_gradients
from shardmap_torch.planning import estimate, this_machine

TURNS: Final = 5


def mlp(mesh: Mesh) -> Built:
    """Builds a step of an MLP whose hidden features are sharded, and its rows over "dp"."""

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        y = all_reduce(torch.relu(x @ params["up"]) @ params["down"], "tp", dst=I)
        return all_reduce(y.square().mean(), "dp", op="mean", dst=I)

    def step(params: dict[str, Tensor], x: Tensor) -> Any:
        value, grads = value_and_grad(loss)(params, x)
        return value, sync_gradients(grads, specs, "dp")

    specs = {"up": P(None, "tp"), "down": P("tp")}
    mapped = shard_map(step, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))
    params = {"up": torch.ones(512, 2048), "down": torch.ones(2048, 512)}
    return mapped, (params, torch.ones(1024, 512)), (specs, P("dp"))


def cases(num_ranks: int) -> Iterator[Case]:
    """Yields the cases of so many ranks."""
    for sizes in {(num_ranks, 1), (1, num_ranks)}:
        yield Case(f"MLP dp x tp {'x'.join(map(str, sizes))}", sizes, ("dp", "tp"), mlp)
    yield from planning_memory.cases(num_ranks)


def measured(mesh: Mesh, built: Built) -> float:
    """Returns the seconds of a step."""
    step, args, specs = built
    args, times = device_put(args, mesh, specs), []
    for _ in range(TURNS + 1):  # the first one checks
        dist.barrier()
        start = time.perf_counter()
        step(*args)
        times.append(time.perf_counter() - start)
    return median(times[1:])


def rank() -> None:
    """Compares on one rank; the first prints."""
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    here = this_machine(make_mesh((num_ranks,), ("ranks",), kind="process_group"))
    for case in cases(num_ranks):
        mesh = case.mesh("process_group")
        built = step, args, _ = case.build(mesh)
        before = estimate(step, *args, hardware=here).seconds
        real = measured(mesh, built)
        after = estimate(step, *args, hardware=here).seconds
        disturbed = max(before, after) > 1.2 * min(before, after)
        if dist.get_rank() == 0:
            found = min(before, after)
            words = f"{real * 1e3:9.2f} ms  {found * 1e3:9.2f} ms  {found / real:5.2f}"
            print(f"{case.name:44} {words}" + "  disturbed" * disturbed, flush=True)


def main() -> None:
    """Starts the ranks, and sums up what they print."""
    print(f"{'case':44} {'measured':>12}  {'estimated':>12}  ratio", flush=True)
    real, found = [], []
    for num_ranks in (1, 2, 4):
        command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)
        module = "-m", "benchmarks.planning_time", "--rank"
        lines = subprocess.run(
            [sys.executable, *command, *module], check=True, stdout=subprocess.PIPE, text=True
        ).stdout
        print(lines, end="", flush=True)
        for line in lines.splitlines():
            words = line.split(" ms")
            if len(words) == 3:
                real.append(float(words[0].split()[-1]))
                found.append(float(words[1].split()[-1]))
    near = sum(abs(b / a - 1) <= 0.2 for a, b in zip(real, found, strict=True))
    print(f"{near} of {len(real)} within 20%; rank correlation {_correlation(real, found):.2f}")


def _correlation(one: list[float], other: list[float]) -> float:
    """Computes Spearman's rank correlation."""
    ranks = torch.stack([torch.tensor(each).argsort().argsort().double() for each in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()

"""Compares the estimated time of steps with what they take on 1, 2 and 4 processes of this machine.

    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planning_time
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planning_time 2 MLP GPT  # 2 processes, these
    OMP_NUM_THREADS=1 .venv/bin/python -m benchmarks.planning_time meshes

The cases are those of `planning_memory`, and MLPs. Steps take the lower quartile of ten turns.
Prints the ratio of each, how many are within 20 %, and the rank correlation of estimated and
measured times; and beside these what the processor has done, in the thread that runs the step,
which other programs disturb less. `meshes` does the same with the ten best meshes of a GPT on 4
processes, as `best_mesh` ranks them.
"""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import optree
import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks import planning_memory
from benchmarks.planning_memory import Built, Case, counts, named
from examples.gpt.parallel import Parallel
from shardmap_torch import I, Mesh, P, all_reduce, device_put, make_mesh, shard_map, value_and_grad
from shardmap_torch.optim import sync_gradients
from shardmap_torch.planning import Estimate, best_mesh, estimate, this_machine
from shardmap_torch.planning.measured import ThisMachine, quartile

TURNS: Final = 10


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


def gpt(mesh: Mesh) -> Built:
    """Builds a step of the example GPT, with a choice for each axis of more than one rank."""
    names = [axis for axis, size in mesh.shape.items() if size > 1]
    return planning_memory.gpt(Parallel.of("+".join(names)))(mesh)


def meshes(num_ranks: int) -> Iterator[Case]:
    """Yields the ten best meshes, as `best_mesh` ranks them; every rank calls this."""
    here = this_machine(make_mesh((num_ranks,), ("ranks",), kind="process_group"))
    axes = "dp", "cp", "pp", "tp"
    ranking = best_mesh(lambda mesh: gpt(mesh)[:2], num_ranks, axes=axes, hardware=here)
    for each in ranking.candidates[:10]:
        if each.figures is not None:
            name = f"GPT dp x cp x pp x tp {'x'.join(map(str, each.mesh.axis_sizes))}"
            yield Case(name, each.mesh.axis_sizes, axes, gpt)


def measured(mesh: Mesh, built: Built) -> tuple[float, float]:
    """Returns the seconds of a step, by the clock and of the processor for this thread."""
    step, args, specs = built
    times = []
    for _ in range(TURNS + 1):  # the first one checks
        fresh: Any = optree.tree_map(torch.clone, args)  # type: ignore[arg-type]
        put = device_put(fresh, mesh, specs)  # a step may be given these
        dist.barrier()
        start = time.perf_counter(), time.thread_time()
        step(*put)
        times.append((time.perf_counter() - start[0], time.thread_time() - start[1]))
    wall, processor = zip(*times[1:], strict=True)
    return quartile(wall), quartile(processor)


def processor_seconds(found: Estimate) -> float:
    """Returns what a rank computes, without messages."""
    assert isinstance(found.hardware, ThisMachine)
    return (found.seconds - sum(found.exposed.values())) / found.hardware.sharing


def rank(find: Callable[[int], Iterator[Case]]) -> None:
    """Compares on one rank; the first prints."""
    dist.init_process_group("gloo")
    num_ranks = dist.get_world_size()
    here = this_machine(make_mesh((num_ranks,), ("ranks",), kind="process_group"))
    for case in named(find(num_ranks)):
        mesh = case.mesh("process_group")
        built = step, args, _ = case.build(mesh)
        found = estimate(step, *args, hardware=here)
        real, processor = measured(mesh, built)
        if dist.get_rank() == 0:
            alone = processor_seconds(found)
            print(
                f"{case.name:44} {real * 1e3:9.2f} ms  {found.seconds * 1e3:9.2f} ms  "
                f"{found.seconds / real:5.2f}   {processor * 1e3:9.2f}  {alone * 1e3:9.2f}  "
                f"{alone / processor:5.2f}",
                flush=True,
            )


def main(which: str, numbers: Sequence[int]) -> None:
    """Starts the ranks, and sums up what they print."""
    head = f"{'measured':>12}  {'estimated':>12}  ratio   {'processor':>9}  estimated  ratio"
    print(f"{'case':44} {head}", flush=True)
    found: list[list[float]] = []
    for num_ranks in numbers:
        command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)
        module = "-m", "benchmarks.planning_time", "--rank", *sys.argv[1:]
        with subprocess.Popen(
            [sys.executable, *command, *module], stdout=subprocess.PIPE, text=True
        ) as ranks:
            for line in ranks.stdout or ():
                print(line, end="", flush=True)
                row = line[44:].replace("ms", "").split()
                found += [list(map(float, row))] * (len(row) == 6)
        if ranks.returncode:
            raise SystemExit(f"a process of {num_ranks} failed")
    real, estimated, _, processor, alone, _ = map(list, zip(*found, strict=True))
    for word, a, b in (("clock", real, estimated), ("processor", processor, alone)):
        near = sum(abs(y / x - 1) <= 0.2 for x, y in zip(a, b, strict=True))
        correlation = _correlation(a, b)
        print(f"{word}: {near} of {len(a)} within 20%; rank correlation {correlation:.2f}")


def _correlation(one: list[float], other: list[float]) -> float:
    """Computes Spearman's rank correlation."""
    ranks = torch.stack([torch.tensor(each).argsort().argsort().double() for each in (one, other)])
    return float(torch.corrcoef(ranks)[0, 1])


if __name__ == "__main__":
    which = "meshes" if "meshes" in sys.argv else "cases"
    if "--rank" in sys.argv:
        rank({"meshes": meshes, "cases": cases}[which])
    else:
        main(which, counts([4] if which == "meshes" else [1, 2, 4]))

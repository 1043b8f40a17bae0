"""Compares the estimated memory of steps with what they allocate on 1, 2 and 4 processes.

    .venv/bin/python -m benchmarks.planning_memory
    .venv/bin/python -m benchmarks.planning_memory 4 Llama  # on 4 processes, cases of this name

Allocations are counted, not measured: a mode sees every operation of a real step, and when each
storage that it makes is freed.
"""

import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optree
import torch
import torch.distributed as dist

from benchmarks import planning
from examples.gpt import model
from examples.gpt.model import Config
from examples.gpt.optim import make_optimizer
from examples.gpt.parallel import Parallel
from examples.gpt.step import sharded_step
from shardmap_torch import Mesh, P, ShapeDtype, device_put, make_mesh
from shardmap_torch.mesh.mesh import Kind
from shardmap_torch.planning.dry_run import DryRun, Tape, dry_run

Built = tuple[Callable[..., Any], tuple[Any, ...], Any]
"""A step, its arguments on one device, and their specs."""


@dataclass(frozen=True)
class Case:
    """A step on a mesh, which `build` makes for the mesh of any kind."""

    name: str
    sizes: tuple[int, ...]
    axes: tuple[str, ...]
    build: Callable[[Mesh], Built]
    views: tuple[dict[str, int], ...] = ()

    def mesh(self, kind: Kind) -> Mesh:
        return make_mesh(self.sizes, self.axes, kind=kind, views=self.views)


GPT: Final[dict[str, list[tuple[int, ...]]]] = {
    "dp": [(1,), (2,), (4,)],
    "tp": [(2,), (4,)],
    "tp+sp": [(2,), (4,)],
    "dp+tp": [(2, 2), (1, 4)],
    "dp+tp+sp": [(2, 2)],
    "fsdp": [(2,), (4,)],
    "fsdp+tp": [(2, 2)],
    "fsdp+tp+sp": [(2, 2)],
    "zero": [(2,), (4,)],
    "zero+tp+sp": [(2, 2)],
    "cp": [(2,), (4,)],
    "dp+cp": [(2, 2)],
    "pp": [(2,), (4,)],
    "pp+tp": [(2, 2)],
    "dp+pp": [(2, 2)],
    "ep": [(2,), (4,)],
    "fsdp+ep": [(4,)],
}
LLAMA: Final[dict[str, tuple[int, int]]] = {
    "1x1": (1, 1), "2x1": (2, 1), "1x2": (1, 2), "4x1": (4, 1), "2x2": (2, 2), "1x4": (1, 4),
}  # fmt: skip


def cases(num_ranks: int) -> Iterator[Case]:
    """Yields the cases of so many ranks."""
    for choice, meshes in GPT.items():
        parallel = Parallel.of(choice)
        for sizes in meshes:
            full = parallel.mesh_sizes(sizes)
            if torch.Size(full).numel() == num_ranks:
                views = tuple(parallel.views(full, Config.experts))
                name = f"GPT {choice} {'x'.join(map(str, sizes))}"
                yield Case(name, full, parallel.mesh_axes, gpt(parallel), views)
    for layers in (2, 4):
        for name, sizes in LLAMA.items():
            if sizes[0] * sizes[1] == num_ranks:
                label = f"Llama of {layers}, recomputed, fsdp x tp {name}"
                yield Case(label, sizes, ("fsdp", "tp"), _llama(layers, "full"))
    recomputes: tuple[planning.Recompute, ...] = "op", "none"
    for recompute in recomputes:
        for name, sizes in LLAMA.items():
            if sizes[0] * sizes[1] == num_ranks:
                label = f"Llama of 4, {recompute}, donating, fsdp x tp {name}"
                yield Case(label, sizes, ("fsdp", "tp"), _llama(4, recompute, donates=True))


def gpt(parallel: Parallel) -> Callable[[Mesh], Built]:
    """Returns what builds a step of the example GPT."""

    def build(mesh: Mesh) -> Built:
        config = Config(length=64, layers=4, parallel=parallel)
        optimizer, specs = make_optimizer(config, 1000, 20), model.specs(config)
        params = model.init(config)
        torch.manual_seed(0)
        batch = torch.randint(config.vocabulary, (16, config.length + 1))
        args = params, optimizer.init(params), batch
        return sharded_step(mesh, config, optimizer), args, (specs, optimizer.specs(specs), P("dp"))

    return build


def _llama(
    layers: int, recompute: planning.Recompute, donates: bool = False
) -> Callable[[Mesh], Built]:
    def build(mesh: Mesh) -> Built:
        llama = planning.Llama(64, layers, 8, 4, 192, 512)
        step, shapes = planning.build(mesh, llama, 2, 64, recompute, donates)
        args: Any = optree.tree_map(
            lambda x: torch.zeros(x.shape, dtype=x.dtype),
            shapes,
            is_leaf=lambda x: isinstance(x, ShapeDtype),
        )
        specs = planning.specs_of(llama)
        state_specs = {"step": P(), "exp_avg": specs, "exp_avg_sq": specs}
        return step, args, (specs, state_specs, planning.batch_spec(mesh))

    return build


def allocated(case: Case) -> int:
    """Runs a step, and returns the most that is allocated at a time."""
    mesh = case.mesh("process_group")
    step, args, specs = case.build(mesh)
    tree: Any = args
    fresh: Any = optree.tree_map(torch.clone, tree)  # what is put may be donated
    step(*device_put(fresh, mesh, specs))
    args = device_put(args, mesh, specs)
    run = DryRun(case.name, mesh)
    leaves: list[Any] = optree.tree_leaves(args)  # type: ignore[arg-type]
    with Tape(run) as tape:
        tape.hold([getattr(x, "_local_tensor", x) for x in leaves])
        step(*args)
    return max(run.live())


def estimated(case: Case) -> int:
    """Returns the most that is estimated to be alive at a time."""
    step, args, _ = case.build(case.mesh("abstract"))
    return max(dry_run(step, args, {}).live())


def named(found: Iterable[Case]) -> Iterator[Case]:
    """Yields the cases whose names begin with a word of the command line, if it has any."""
    words = tuple(word for word in sys.argv[1:] if word[0].isupper())
    yield from (case for case in found if not words or case.name.startswith(words))


def counts(default: Sequence[int]) -> Sequence[int]:
    """Returns the numbers of processes of the command line, if it has any."""
    return [int(word) for word in sys.argv[1:] if word.isdigit()] or default


def rank() -> None:
    """Compares on one rank; the first prints."""
    dist.init_process_group("gloo")
    for case in named(cases(dist.get_world_size())):
        real = allocated(case)
        if dist.get_rank() == 0:
            ratio = estimated(case) / real
            print(f"{case.name:44} {real:12,} B  {ratio:.3f}", flush=True)
        dist.barrier()


def main() -> None:
    """Starts the ranks."""
    for num_ranks in counts((1, 2, 4)):
        command = "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)
        module = "-m", "benchmarks.planning_memory", "--rank", *sys.argv[1:]
        subprocess.run([sys.executable, *command, *module], check=True)


if __name__ == "__main__":
    rank() if "--rank" in sys.argv else main()

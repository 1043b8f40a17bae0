"""Cost of simulating 8, 64 or 512 ranks: a tensor-parallel MLP beside the same MLP, unsharded.

    .venv/bin/python benchmarks/simulated_mlp.py

x is 64x512, the hidden layer 2048 wide, float32. The work of all ranks is done in one process, so
the arithmetic is the same; what is over is the price of the simulation. Targets, for the batched
simulation ("vmap"): 2x the unsharded forward, and 2x its gradients.
One thread; medians of interleaved rounds. Calls are checked, and the checker has seen the
signature before.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))  # run as a script, from anywhere

from benchmarks.timing import compare, show, verdict
from shardmap_torch import I, P, R, all_reduce, convert, grad, make_mesh, shard_map

MLP = Callable[[Tensor, Tensor, Tensor], Tensor]
How = Literal["vmap", "ranks"]
HOWS: tuple[How, ...] = ("vmap", "ranks")
ROUNDS: dict[How, int] = {"vmap": 50, "ranks": 10}
NUM_RANKS: dict[How, tuple[int, ...]] = {"vmap": (8, 64, 512), "ranks": (8, 64)}
TARGETS = {"forward": 2.0, "gradients": 2.0}


def plain(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    return torch.relu(x @ w1) @ w2


def tensor_parallel(x: Tensor, w1: Tensor, w2: Tensor) -> Tensor:
    x = convert(x, "tp", src=I, dst=R)
    return all_reduce(torch.relu(x @ w1) @ w2, "tp", dst=I)


def simulated(simulate: How, num_ranks: int) -> MLP:
    mesh = make_mesh((num_ranks,), ("tp",), kind="simulated", simulate=simulate)
    in_specs = (P(invariant="tp"), P(None, "tp"), P("tp"))
    return shard_map(tensor_parallel, mesh=mesh, in_specs=in_specs, out_specs=P())


def differentiated(num_ranks: int) -> Callable[..., tuple[Tensor, ...]]:
    """The gradients, taken by each rank in the body."""
    mesh = make_mesh((num_ranks,), ("tp",), kind="simulated")
    specs = (P(invariant="tp"), P(None, "tp"), P("tp"))
    body = grad(lambda *args: tensor_parallel(*args).sum(), argnums=(0, 1, 2))
    return shard_map(body, mesh=mesh, in_specs=specs, out_specs=specs)


def gradients(mlp: MLP, *args: Tensor) -> tuple[Tensor, ...]:
    x, w1, w2 = args
    return torch.autograd.grad(mlp(x, w1, w2).sum(), args)


def rows_of(pass_: str, taken: Mapping[str, float]) -> Iterator[tuple[str, ...]]:
    for name, each in taken.items():
        ratio = each / taken["unsharded"]
        target = verdict(ratio, TARGETS[pass_]) if name.startswith("vmap") else ""
        yield pass_, name, f"{each * 1e3:.2f} ms", f"{ratio:.2f}x", target


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    x, w1, w2 = torch.randn(64, 512), torch.randn(512, 2048) / 22, torch.randn(2048, 512) / 45
    leaves = [each.clone().requires_grad_() for each in (x, w1, w2)]
    rows: list[tuple[str, ...]] = []
    for how in HOWS:  # apart, so that the threads of "ranks" do not slow down "vmap"
        mlps: dict[str, MLP] = {"unsharded": plain}
        mlps |= {f"{how}, {num} ranks": simulated(how, num) for num in NUM_RANKS[how]}
        for mlp in mlps.values():
            torch.testing.assert_close(mlp(x, w1, w2), plain(x, w1, w2), rtol=1e-4, atol=1e-4)
        forward = {name: partial(mlp, x, w1, w2) for name, mlp in mlps.items()}
        backward = {name: partial(gradients, mlp, *leaves) for name, mlp in mlps.items()}
        if how == "vmap":
            inside = {f"vmap, {num} ranks, in the body": num for num in NUM_RANKS[how]}
            backward |= {n: partial(differentiated(num), x, w1, w2) for n, num in inside.items()}
        rows += rows_of("forward", compare(forward, ROUNDS[how]))
        rows += rows_of("gradients", compare(backward, ROUNDS[how]))
    show("64x512x2048 MLP", ("", "", "median", "of unsharded", "target"), rows)


if __name__ == "__main__":
    main()

"""Contestants on torch, in one process of one gloo rank: unsharded, ours, local_map, spmd_types."""

from collections.abc import Callable, Sequence
from functools import partial
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.experimental import local_map

from benchmarks.peers.problem import FORWARD, GRADIENTS, LEAVES, NUM_RANKS, call_of, leaf, mlp
from benchmarks.peers.serving import Contestant, serve
from benchmarks.simulated_mlp import gradients, plain, simulated
from shardmap_torch import Mesh, P, device_put, make_mesh, shard_map

Cases = dict[tuple[str, str], Contestant]


def identity(*xs: Tensor) -> tuple[Tensor, ...]:
    """Returns its arguments."""
    return xs


def total(values: Tensor | Sequence[Tensor]) -> float:
    """Adds up the magnitudes of results."""
    tensors = [values] if isinstance(values, Tensor) else values
    locals_ = [x.full_tensor() if isinstance(x, DTensor) else x for x in tensors]
    return sum(float(x.detach().double().abs().sum()) for x in locals_)


def calls(mesh: Mesh) -> Cases:
    """Identities of DTensors."""
    x = device_put(torch.from_numpy(leaf()), mesh, P("tp"))
    assert isinstance(x, DTensor)
    cases: Cases = {}
    for count in LEAVES:
        rows = ([Shard(0)],) * count
        specs = (P("tp"),) * count
        mapped = partial(shard_map, identity, mesh=mesh, in_specs=specs, out_specs=specs)
        functions: dict[str, Callable[..., Any]] = {
            "local_map": local_map(identity, rows, rows, device_mesh=x.device_mesh),
            "ours, checked": mapped(),
            "ours, unchecked": mapped(check=False),
        }
        xs = [x] * count
        for name, each in functions.items():
            cases[call_of(count), name] = Contestant(partial(each, *xs), total)
    return cases


def mlps() -> Cases:
    """The MLP unsharded, and on simulated meshes."""
    operands = [torch.from_numpy(each) for each in mlp()]
    leaves = [each.clone().requires_grad_() for each in operands]
    functions = {
        "torch, unsharded": plain,
        "ours, vmap": simulated("vmap", NUM_RANKS),
        "ours, ranks": simulated("ranks", NUM_RANKS),
    }
    cases: Cases = {}
    for name, each in functions.items():
        cases[FORWARD, name] = Contestant(partial(each, *operands), total)
        cases[GRADIENTS, name] = Contestant(partial(gradients, each, *leaves), total)
    return cases


def main() -> None:
    """Serves them."""
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        dist.init_process_group("gloo", f"file://{folder}/store", rank=0, world_size=1)
        mesh = make_mesh((1,), ("tp",), kind="process_group")
        serve(f"torch {torch.__version__}", {**calls(mesh), **mlps()})
        dist.destroy_process_group()


if __name__ == "__main__":
    main()

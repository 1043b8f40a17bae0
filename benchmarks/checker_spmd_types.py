"""The transformer of `benchmarks/checker.py` in the API of spmd_types; does nothing when run.

`typecheck` types operations while the program runs. Here it runs on fake tensors, with a process
group that sends nothing. What is timed is the whole: parameters made and typed, the forward under
`typecheck`, and the backward, of which it only looks at the type of the loss, since its collectives
carry their transposes with them. Its global mode has no type for a head dim split from a sharded
one, so that attention stands in a `local_map`.
"""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial

import spmd_types as spmd
import torch
from spmd_types.checker import typecheck
from torch import Tensor, distributed
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.transformer import (
    LENGTH,
    SEQUENCES,
    SHAPES,
    SPECS,
    WIDTH,
    Layer,
    Parallel,
    attend,
    shard_of,
)

Context = Callable[[], AbstractContextManager[object]]


def _use(layer: Layer) -> Layer:
    return {name: spmd.convert(each, "dp", src=spmd.I, dst=spmd.R) for name, each in layer.items()}


def _add_up(x: Tensor, axis: str, local: bool) -> Tensor:
    # What global mode knows to be a pending sum is V in local mode.
    total: Tensor = spmd.all_reduce(x, axis, src=spmd.V if local else spmd.P, dst=spmd.I)
    return total


def _program(local: bool) -> Parallel:
    return Parallel(
        use=_use,
        enter=lambda x: spmd.convert(x, "tp", src=spmd.I, dst=spmd.R),
        leave=lambda x: _add_up(x, "tp", local),
        finish=lambda x: _add_up(x, "dp", local),
        attend=spmd.local_map(out_types={"dp": spmd.S(0), "tp": spmd.S(2)})(attend),
    )


def _parameter(name: str) -> Tensor:
    sharded = dict(SPECS[name].sharded_dims)
    over_tp = spmd.S(next(iter(sharded))) if sharded else spmd.I
    typed: Tensor = spmd.assert_type(
        torch.empty(shard_of(name), requires_grad=True), {"dp": spmd.I, "tp": over_tp}
    )
    return typed


def _typecheck(depth: int, mesh: DeviceMesh, local: bool, context: Context) -> None:
    with context(), spmd.set_current_mesh(mesh), typecheck(local=local):
        layers: list[Mapping[str, Tensor]] = [
            {name: _parameter(name) for name in SHAPES} for _ in range(depth)
        ]
        x = spmd.assert_type(torch.empty(SEQUENCES, LENGTH, WIDTH), {"dp": spmd.S(0), "tp": spmd.I})
        _program(local).loss(layers, x).backward()


def typechecks(
    depth: int, meshes: Sequence[tuple[int, int]], strict: Sequence[str]
) -> dict[str, Callable[[], object]]:
    """Returns what to time, by name, for each strictness and each mesh."""
    if not distributed.is_initialized():
        world = max(dp * tp for dp, tp in meshes)
        distributed.init_process_group("fake", rank=0, world_size=world, store=FakeStore())
    found: dict[str, Callable[[], object]] = {}
    for which in strict:
        for dp, tp in meshes:
            mesh = DeviceMesh(
                "cpu", torch.arange(dp * tp).view(dp, tp), mesh_dim_names=("dp", "tp")
            )
            # Once with data: the meshes that it makes of every axis cannot be made under fakes.
            _typecheck(1, mesh, which == "local", nullcontext)
            name = f"spmd_types {which}, {dp * tp} ranks"
            found[name] = partial(_typecheck, depth, mesh, which == "local", FakeTensorMode)
    return found

"""Collectives over bound axes are right on values that automatic axes shard, along every dim."""

from collections.abc import Callable, Collection
from unittest import mock

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Mesh,
    P,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_index,
    broadcast,
    convert,
    device_put,
    full,
    ppermute,
    ragged_all_to_all,
    reduce_scatter,
    shard_map,
)
from shardmap_torch import Partial as Pending
from shardmap_torch.mixing import backend
from tests.programs.support.everywhere import run_on
from tests.programs.support.harness import random
from tests.support.pool import Gloo

SHAPE, AXES = (2, 2), ("dp", "tp")
V0, V1, ALL = P("tp"), P(None, "tp"), P()

Body = Callable[[Tensor], Tensor]
COLLECTIVES: dict[str, tuple[Body, P, P]] = {
    "sum": (lambda x: all_reduce(x, "tp", dst=I), V0, ALL),
    "sum to R": (lambda x: all_reduce(x, "tp", dst=R) * axis_index("tp"), V0, V0),
    "mean": (lambda x: all_reduce(x, "tp", dst=I, op="mean"), V0, ALL),
    "max": (lambda x: all_reduce(x, "tp", dst=I, op="max"), V0, ALL),
    "gather": (lambda x: all_gather(x, "tp", dim=1, dst=I), V1, ALL),
    "gather to R": (lambda x: all_gather(x, "tp", dim=0, dst=R) * axis_index("tp"), V0, V1),
    "stack": (lambda x: all_gather(x, "tp", dim=1, dst=I, tiled=False), V0, ALL),
    "scatter": (lambda x: reduce_scatter(x, "tp", dim=1), V0, V1),
    "unstack": (lambda x: reduce_scatter(x, "tp", dim=2, tiled=False), V0, V0),
    "exchange": (lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=0), V0, V1),
    "exchange one": (lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=1), V0, V0),
    "exchange untiled": (
        lambda x: all_to_all(x, "tp", split_dim=2, concat_dim=0, tiled=False),
        V1,
        V1,
    ),
    "exchange untiled back": (
        lambda x: all_to_all(x, "tp", split_dim=1, concat_dim=2, tiled=False),
        V1,
        V1,
    ),
    "permute": (lambda x: ppermute(x, "tp", [(0, 1)]), V0, V0),
    "broadcast": (lambda x: broadcast(x, "tp", 1, dst=I), V0, ALL),
    "slice": (lambda x: convert(x, "tp", src=I, dst=V, dim=1), ALL, V1),
    "pad": (
        lambda x: all_reduce(convert(x, "tp", src=V, dst=Pending, dim=0), "tp", dst=I),
        V0,
        ALL,
    ),
    "ragged": (
        lambda x: ragged_all_to_all(x, "tp", send_sizes=[0, 2], length=4)[0],
        V0,
        V0,
    ),
}


def layouts(x: Tensor, mesh: Mesh) -> list[Tensor]:
    """One value, sharded over the automatic axis along each dim in turn."""
    specs = (P("dp"), P(None, "dp"), P(None, None, "dp"))
    return [device_put(x.clone(), mesh, spec) for spec in specs]


def summed(x: Tensor) -> Tensor:
    """Computes what is a pending sum over an automatic axis that shards any dim."""
    return (x.unsqueeze(-1) * x.unsqueeze(-2)).sum(-1) + x.sum()


def are_right(mesh: Mesh, names: Collection[str] = tuple(COLLECTIVES)) -> None:
    """Compares with the same call on a plain value, which is global over the automatic axis."""
    x = random((4, 4, 2), 1)
    for name in names:
        body, src, dst = COLLECTIVES[name]
        for before in (None, summed) if name in ("sum", "max", "gather", "scatter") else (None,):
            f = mapped(body, before, mesh, src, dst)
            expected, wanted = value_and_gradient(f, x.clone())
            for placed in layouts(x, mesh):
                value, gradient = value_and_gradient(f, placed)
                close(value, expected, name)
                close(gradient, wanted, name)


def are_right_without_their_dims(mesh: Mesh) -> None:
    with mock.patch.object(backend, "_DIMS", {}):
        are_right(mesh, ("sum", "stack", "unstack", "exchange untiled"))


def mapped(body: Body, before: Body | None, mesh: Mesh, src: P, dst: P) -> Body:
    """Makes a function without a check, which would take most of the time."""

    def f(x: Tensor) -> Tensor:
        return body(x if before is None else before(x))

    src = P(invariant={"tp"}) if src == ALL else src
    return shard_map(f, mesh=mesh, in_specs=src, out_specs=dst, axis_names={"tp"}, check=False)


def value_and_gradient(f: Callable[[Tensor], Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    y = f(x.requires_grad_())
    value = full(y)
    (value * random(tuple(value.shape), 2)).sum().backward()
    assert x.grad is not None
    return value.detach(), full(x.grad)


def close(actual: Tensor, expected: Tensor, name: str) -> None:
    torch.testing.assert_close(
        actual, expected, rtol=1e-10, atol=1e-10, msg=lambda m: f"{name}: {m}"
    )


def test_collectives_are_right_along_every_sharded_dim(gloo: Gloo) -> None:
    run_on("gloo", are_right, gloo, SHAPE, AXES)


def test_a_movement_about_whose_dims_nothing_is_said_is_right(gloo: Gloo) -> None:
    run_on("gloo", are_right_without_their_dims, gloo, SHAPE, AXES)

"""State sharded over the ranks that hold the same parameters changes no step."""

from functools import partial
from typing import Any

import pytest
import torch

from shardmap_torch import Mesh, P, explain, full, make_mesh, shard_map
from shardmap_torch.optim import Optimizer, adamw, sgd, shard_over, zero
from tests.optim.training import (
    AXES,
    MESH,
    SPECS,
    Params,
    assert_equal,
    params,
    train,
    train_with_torch,
)
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.support.pool import Gloo

BARE = {name: P(*spec.entries) for name, spec in SPECS.items()}
MAX_NORM = 0.5


def sharded(mesh: Mesh, optimizer: Optimizer, max_norm: float | None = None) -> Optimizer:
    shards = shard_over(params(), BARE, "dp", mesh)
    return zero(optimizer, SPECS, shards, "dp", max_norm=max_norm)


def equals_torch(mesh: Mesh) -> None:
    for optimizer, reference, max_norm in (
        (adamw(0.1), partial(torch.optim.AdamW, lr=0.1), MAX_NORM),
        (sgd(0.01, momentum=0.9), partial(torch.optim.SGD, lr=0.01, momentum=0.9), None),
    ):
        over_dp = sharded(mesh, optimizer, max_norm)
        assert_equal(train(mesh, over_dp, over_dp.update), train_with_torch(reference, max_norm))


@ON_EVERY_MESH
def test_training_with_sharded_state_equals_torch_on_one_device(kind: Any, gloo: Gloo) -> None:
    run_on(kind, equals_torch, gloo, MESH, AXES)


def holds_half_of_the_state(mesh: Mesh) -> None:
    """Every rank of dp holds one half of each moment that can be halved."""
    optimizer = sharded(mesh, adamw())
    specs = optimizer.specs(BARE)["exp_avg"]
    seen: dict[str, tuple[int, ...]] = {}

    def look(moments: Params) -> Params:
        seen.update({name: tuple(moment.shape) for name, moment in moments.items()})
        return moments

    state = optimizer.init(params())["exp_avg"]
    moved = shard_map(look, mesh=mesh, in_specs=(specs,), out_specs=specs)(state)
    assert_equal(full(moved), state)
    assert seen == {"scale": (3,), "w1": (3, 4), "b1": (2,), "w2": (4, 3), "gain": ()}


@pytest.mark.parametrize("kind", ["ranks", pytest.param("gloo", marks=pytest.mark.slow)])
def test_each_rank_holds_its_part_of_the_moments(kind: Any, gloo: Gloo) -> None:
    run_on(kind, holds_half_of_the_state, gloo, MESH, AXES)


@pytest.mark.parametrize(
    ("spec", "shape", "expected"),
    [
        (P(), (4, 8), P(None, "dp")),  # the largest dim
        (P(), (4, 4), P("dp")),  # the first of equal ones
        (P("tp"), (8, 4), P("tp", "dp")),  # an unsharded one of equal local ones
        (P("tp"), (16, 4), P(("tp", "dp"))),
        (P("tp"), (6, 3), P("tp")),  # 3 does not divide over 2 ranks
        (P(replicate={"tp"}), (3,), P()),
        (P(), (), P()),
        (P(), (0,), P()),
    ],
)
def test_parameters_are_sharded_along_the_dim_that_divides_best(
    spec: P, shape: tuple[int, ...], expected: P
) -> None:
    mesh = make_mesh(MESH, AXES, kind="abstract")
    assert shard_over(torch.empty(shape), spec, "dp", mesh) == expected


def test_several_axes_shard_together() -> None:
    mesh = make_mesh(MESH, AXES, kind="abstract")
    assert shard_over(torch.empty(4, 4), P(), ("dp", "tp"), mesh) == P(("dp", "tp"))


def test_the_bytes_are_those_of_an_all_reduce() -> None:
    """Reduce-scatter and all-gather of n bytes over 2 ranks send n/2 each."""
    mesh = make_mesh((2,), ("dp",), kind="abstract")
    specs, weights = {"a": P(), "b": P()}, {"a": torch.ones(4, 4), "b": torch.ones(8)}
    optimizer = zero(sgd(0.1), specs, shard_over(weights, specs, "dp", mesh), "dp")
    pending = {name: P(partial={"dp"}) for name in specs}
    state = optimizer.init(weights)

    @shard_map(mesh=mesh, in_specs=(specs, pending, optimizer.specs(specs)), out_specs=specs)
    def step(params: Params, grads: Params, state: Any) -> Params:
        new: Params = optimizer.update(params, grads, state)[0]
        return new

    num_bytes = 4 * (16 + 8)
    assert f"  dp: {num_bytes}" in str(explain(step, weights, weights, state)).splitlines()

"""Gradients that random bodies take, in a batched body and by each rank alone."""

from random import Random
from typing import Literal

import pytest
import torch
from torch import Tensor

from shardmap_torch import P, ShardTypeError, make_mesh, shard_map
from tests.autodiff.support.random_bodies import AXES, SIZES, SPECS, Body, operand
from tests.support.fuzzing import sampled

QUICK = (3, 18, 28, 39, 43)


def outcome(seed: int, simulate: Literal["auto", "ranks"], mode: str) -> list[Tensor]:
    """All ranks' values and gradients; those of what is differentiated from outside too."""
    specs = tuple(Random(seed).choices(SPECS, k=3))
    mesh = make_mesh(tuple(SIZES.values()), AXES, kind="simulated", simulate=simulate)
    f = shard_map(lambda *xs: Body(seed)(*xs), mesh=mesh, in_specs=specs, out_specs=P(AXES))
    operands = [operand(spec, at) for at, spec in enumerate(specs)]
    if mode == "inside":
        return list(f(*operands))
    leaves = [x.requires_grad_() for x in operands]
    values = f(*leaves)
    total = torch.stack([y.sin().sum() * at for at, y in enumerate(values, 1)]).sum()
    if not total.requires_grad:
        return list(values)
    found = torch.autograd.grad(total, leaves, materialize_grads=True)
    return [*(y.detach() for y in values), *found]


@pytest.mark.parametrize("seed", sampled(range(400), *QUICK))
def test_a_random_body_has_the_gradients_of_each_rank_alone(seed: int) -> None:
    mode = "outside" if seed % 4 == 0 else "inside"
    try:
        expected = outcome(seed, "ranks", mode)
    except ShardTypeError:
        return
    for actual, wanted in zip(outcome(seed, "auto", mode), expected, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-9, atol=1e-9)

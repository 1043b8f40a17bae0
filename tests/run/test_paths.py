"""Branches on numbers taken from tensors, run: on processes, on threads, as one batched program."""

from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, all_gather, all_reduce, check_program, shard_map
from tests.programs.support.everywhere import KINDS, run_on, same
from tests.programs.support.harness import random
from tests.support.pool import Gloo


def step(x: Tensor, w: Tensor) -> Tensor:
    """Other collectives on each way, and another gradient."""
    total = all_reduce((x @ w).square().sum(), "tp", dst=I)
    if total.item() > 1:
        return total / total.item() + all_reduce(x.sum(), "tp", dst=I)
    if total.item() < 0.25:
        raise ValueError(f"the loss is {total.item():.1f}")
    return total * all_gather(x, "tp", dst=I).cos().sum()


def whole(x: Tensor, w: Tensor) -> Tensor:
    total = (x @ w).square().sum()
    if total > 1:
        return total / total.detach() + x.sum()
    return total * x.cos().sum()


def every_path(mesh: Mesh) -> None:
    f = shard_map(step, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P())
    x, w = random((4, 3), 0), random((3, 2), 1)
    size = float((x @ w).square().sum()) ** 0.5
    for total in (4.0, 0.5, 4.0):
        args = [(x / size * total**0.5).requires_grad_(), w.clone().requires_grad_()]
        same(f(*args), whole(*args))
        same(torch.autograd.grad(f(*args), args), torch.autograd.grad(whole(*args), args))
    with pytest.raises(ValueError, match=r"the loss is 0\.[01]"):
        f(x / size / 4, w)
    assert len(check_program(f, x, w).program_paths) == 3
    assert not check_program(f, x, w).batches


def covariance(mesh: Mesh) -> None:
    """torch asks whether its weights add up to zero, and raises then."""

    def body(x: Tensor, w: Tensor) -> Tensor:
        return torch.cov(all_gather(x, "tp", dst=I), aweights=w)

    x, w = random((4, 3), 0), random((3,), 1).abs()
    checks: tuple[Any, ...] = (True, "global")
    for check in checks:
        f = shard_map(body, mesh=mesh, in_specs=(P("tp"), P()), out_specs=P(), check=check)
        same(f(x, w), torch.cov(x, aweights=w))
        with pytest.raises(RuntimeError, match="weights sum to zero"):
            f(x, 0 * w)


@pytest.mark.parametrize("kind", KINDS[1:])
def test_what_torch_raises_for_a_number_ends_a_path(kind: Any, gloo: Gloo) -> None:
    run_on(kind, covariance, gloo)


@pytest.mark.parametrize(
    "kind", ["auto", "ranks", "vmap", pytest.param("gloo", marks=pytest.mark.slow)]
)
def test_each_way_runs_as_it_was_checked(kind: Any, request: pytest.FixtureRequest) -> None:
    gloo: Any = request.getfixturevalue("gloo") if kind == "gloo" else None
    run_on(kind, every_path, gloo)

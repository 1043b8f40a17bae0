"""Checked bodies that a mesh may batch: a write that does not match would be an error."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from shardmap_torch import I, P, R, all_gather, all_reduce, check_program, make_mesh, shard_map
from tests.programs.support.everywhere import same
from tests.programs.support.harness import random

AUTO = make_mesh((2, 2), ("dp", "tp"), kind="simulated")
RANKS = make_mesh((2, 2), ("dp", "tp"), kind="simulated", simulate="ranks")


def made(x: Tensor) -> Tensor:
    return torch.zeros(4, dtype=x.dtype)


def like(x: Tensor) -> Tensor:
    return torch.zeros_like(all_gather(x, "tp", dst=R))


def gradient_of_nothing(x: Tensor) -> Tensor:
    zeros: Tensor = torch.func.grad(lambda y: (y.detach() * y.detach()).sum())(x)
    return zeros


# The buffer, what is written into its first rows, and whether one batched body can do it.
WRITES: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor], bool]] = {
    "its own": (made, lambda x: x, False),
    "zeros like its own": (made, torch.zeros_like, False),
    "a gradient that is zero": (made, gradient_of_nothing, False),
    "a sum over one axis of two": (made, lambda x: all_reduce(x, "tp", dst=R), False),
    "a sum over both": (made, lambda x: all_reduce(x, ("dp", "tp"), dst=I), True),
    "zeros like a sum over both": (
        made,
        lambda x: torch.zeros_like(all_reduce(x, ("dp", "tp"), dst=I)),
        True,
    ),
    "zeros like what varies over dp, into such": (
        like,
        lambda x: torch.zeros_like(all_reduce(x, "tp", dst=R)),
        True,
    ),
    "zeros like its own, into zeros that vary over dp": (like, torch.zeros_like, False),
}


@pytest.mark.parametrize(("buffer", "written", "batches"), WRITES.values(), ids=WRITES)
def test_what_is_batched_is_written_only_into_what_is(
    buffer: Callable[[Tensor], Tensor], written: Callable[[Tensor], Tensor], batches: bool
) -> None:
    def body(x: Tensor) -> Tensor:
        rows = buffer(x)
        rows[:2] = written(x)[:2]
        return rows.sum() * x

    x = random((8,), 0)
    spec = P(("dp", "tp"))
    mapped = shard_map(body, mesh=AUTO, in_specs=spec, out_specs=spec)
    assert check_program(mapped, x).batches == batches
    same(mapped(x), shard_map(body, mesh=RANKS, in_specs=spec, out_specs=spec)(x))


def asks_for_a_gradient(x: Tensor) -> Tensor:
    return x * (2 if x.requires_grad else 3)


def writes_under_a_mask(x: Tensor) -> Tensor:
    y = x * 2
    y[y > 0] = 1
    return y


def takes_a_list(x: Tensor) -> Tensor:
    return torch._foreach_mul([x, x], 2.0)[1]


@pytest.mark.parametrize("body", [asks_for_a_gradient, writes_under_a_mask, takes_a_list])
def test_what_torch_batches_wrongly_or_not_at_all_runs_as_ranks(
    body: Callable[[Tensor], Tensor],
) -> None:
    x = random((8,), 0)
    mapped = shard_map(body, mesh=AUTO, in_specs=P("dp"), out_specs=P("dp"))
    here, there = x.clone().requires_grad_(), x.clone().requires_grad_()
    same(mapped(here), body(there))
    mapped(here).sum().backward()
    body(there).sum().backward()
    assert here.grad is not None
    assert there.grad is not None
    same(here.grad, there.grad)

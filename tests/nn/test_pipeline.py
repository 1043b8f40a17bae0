"""A pipeline has the loss and the gradients of its layers in a row, whatever its schedule."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from shardmap_torch import (
    I,
    LayerError,
    Mesh,
    P,
    R,
    all_reduce,
    convert,
    full,
    make_mesh,
    shard_map,
    validate_rule,
)
from shardmap_torch.core.tree import flatten
from shardmap_torch.nn import (
    gpipe_schedule,
    one_forward_one_backward_schedule,
    pipeline_value_and_grad,
)
from shardmap_torch.nn.pipeline import Schedule, pipeline_region
from tests.nn.support.cases import EXACT, random
from tests.support.golden import told
from tests.support.pool import Gloo

PARAMS = {"w": random(4, 3, 3), "b": random(4, 3)}
HEAD = random(3, 3, seed=2)
X, TARGETS = random(5, 4, 3), random(5, 4, 3, seed=1)
SCHEDULES = {"gpipe": gpipe_schedule, "1f1b": one_forward_one_backward_schedule}


def stage(params: dict[str, Tensor], x: Tensor) -> Tensor:
    for w, b in zip(params["w"].unbind(), params["b"].unbind(), strict=True):
        x = torch.tanh(x @ w + b)
    return x


def stage_with_loads(params: dict[str, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
    """A stage whose layers have a loss of their own."""
    loads = []
    for w, b in zip(params["w"].unbind(), params["b"].unbind(), strict=True):
        x = torch.tanh(x @ w + b)
        loads.append((x * w[0]).square().sum())
    return x, torch.stack(loads).sum()


STAGES: dict[str, Callable[..., Any]] = {"plain": stage, "with loads": stage_with_loads}


def one_row(params: dict[str, Tensor], x: Tensor) -> Tensor:
    return x[:1]


def another_schedule(num_ranks: int, num_microbatches: int) -> Schedule:
    return gpipe_schedule(num_ranks, num_microbatches)


def loss(y: Tensor, target: Tensor) -> Tensor:
    return (y - target).square().sum()


def loss_of_head(head: Tensor, y: Tensor, target: Tensor) -> Tensor:
    return loss(y @ head, target)


def one_device(kind: str) -> list[Tensor]:
    def total(params: dict[str, Tensor], head: Tensor, x: Tensor) -> Tensor:
        sums = []
        for each, target in zip(x, TARGETS, strict=True):
            y, load = stage_with_loads(params, each)
            sums.append(loss_of_head(head, y, target) + (load if kind == "with loads" else 0))
        return torch.stack(sums).sum()

    grads, value = torch.func.grad_and_value(total, argnums=(0, 1, 2))(PARAMS, HEAD, X)
    return [value, *flatten(grads)[0]]


def step(params: Any, head: Tensor, x: Tensor, targets: Tensor, stage: Any, schedule: Any) -> Any:
    params, head = convert((params, head), "dp", src=I, dst=R)
    value, grads, d_x = pipeline_value_and_grad(
        stage, loss_of_head, params, x, targets, "pp", head=head, schedule=schedule
    )
    return all_reduce((value, grads), "dp", dst=I), d_x


def on_mesh(mesh: Mesh, schedule: str, kind: str = "plain") -> list[Tensor]:
    batch = P(None, "dp")
    f = shard_map(
        partial(step, stage=STAGES[kind], schedule=SCHEDULES[schedule]),
        mesh=mesh,
        in_specs=(P("pp"), P(), batch, batch),
        out_specs=((P(), (P("pp"), P())), batch),
        check="global",
    )
    (value, grads), d_x = full(f(PARAMS, HEAD, X, TARGETS))
    return [value, *flatten((grads, d_x))[0]]


def in_worker(sizes: tuple[int, int]) -> list[list[Tensor]]:
    mesh = make_mesh(sizes, ("dp", "pp"))
    return [on_mesh(mesh, name) for name in SCHEDULES]


def assert_same(found: list[Tensor], kind: str = "plain") -> None:
    for one, other in zip(found, one_device(kind), strict=True):
        torch.testing.assert_close(one, other, rtol=EXACT, atol=EXACT)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("sizes", "simulate"), [((2, 2), "vmap"), ((1, 4), "ranks")])
def test_on_simulated_ranks_loss_and_gradients_are_those_of_one_device(
    sizes: tuple[int, int], simulate: Any, schedule: str
) -> None:
    assert_same(on_mesh(make_mesh(sizes, ("dp", "pp"), simulate=simulate), schedule))


@pytest.mark.parametrize(("sizes", "simulate"), [((2, 2), "vmap"), ((1, 4), "ranks")])
def test_a_loss_of_each_stage_is_added_with_its_gradients(
    sizes: tuple[int, int], simulate: Any
) -> None:
    mesh = make_mesh(sizes, ("dp", "pp"), simulate=simulate)
    assert_same(on_mesh(mesh, "1f1b", "with loads"), "with loads")


def test_on_processes_loss_and_gradients_are_those_of_one_device(gloo: Gloo) -> None:
    for results in gloo(2).run(in_worker, (1, 2), timeout=200):
        for found in results:
            assert_same(found)


def test_the_region_keeps_its_promise() -> None:
    leaves, structure = flatten((PARAMS, HEAD))
    region = pipeline_region(
        stage, loss_of_head, structure, "pp", one_forward_one_backward_schedule, len(PARAMS)
    )
    typed = region.typed(*[P()] * 5, ranks=[x.ndim for x in (X, TARGETS, *leaves)])
    assert validate_rule(typed, X, TARGETS, *leaves, num_ranks=2)


@pytest.mark.parametrize(
    "body",
    [
        lambda w, x: pipeline_value_and_grad(stage, loss, w, x, x[:2], "pp"),
        lambda w, x: pipeline_value_and_grad(stage, loss, w, x.sum(), x.sum(), "pp"),
        lambda w, x: pipeline_value_and_grad(one_row, loss, w, x, x, "pp"),
        lambda w, x: pipeline_value_and_grad(stage, loss, w, x, x, "pp", schedule=another_schedule),
    ],
)
def test_what_does_not_match_is_refused(body: Callable[..., Any]) -> None:
    mesh = make_mesh((2,), ("pp",), kind="simulated")
    f = shard_map(body, mesh=mesh, in_specs=(P("pp"), P()), out_specs=(P(), P("pp"), P()))
    with told(LayerError):
        f(PARAMS, X)

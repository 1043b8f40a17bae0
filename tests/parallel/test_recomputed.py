"""torch.utils.checkpoint within a parallelized module, and parameters tied after `parallelize`."""

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from shardmap_torch import (
    ColwiseParallel,
    Mesh,
    RowwiseParallel,
    TransformError,
    make_mesh,
    parallelize,
)
from tests.parallel.support.transformers_models import make_batch, make_model
from tests.programs.support.harness import global_value, random, worker_mesh
from tests.support.golden import told
from tests.support.pool import Gloo

SIMULATED = make_mesh((2,), ("tp",), kind="simulated")
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class MLP(nn.Module):
    """Recomputes what one of the ways below makes of it."""

    def __init__(self, way: Callable[..., Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.way = nn.Linear(8, 16), nn.Linear(16, 8), way
        self.runs = [0]

    def inner(self, x: Tensor, power: int = 1) -> Tensor:
        self.runs[0] += 1
        y: Tensor = self.down(torch.tanh(self.up(x))) ** power
        return y

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, x)


again = partial(checkpoint, use_reentrant=False)

WAYS: dict[str, Callable[..., Any]] = {
    "a method": lambda self, x: again(self.inner, x, power=2),
    "a closure": lambda self, x: again(lambda x: self.inner(x), x),
    "a partial of a function": lambda self, x: again(partial(MLP.inner, self, power=3), x),
    "a module below": lambda self, x: self.down(again(self.up, x).tanh()),
    "within each other": lambda self, x: again(lambda x: again(self.inner, x), x),
    "reentrant": lambda self, x: checkpoint(self.inner, x, use_reentrant=True),
}


def gradients(module: nn.Module) -> dict[str, Tensor]:
    x = random((4, 8), 1).requires_grad_()
    module(x).square().sum().backward()
    found = {name: p.grad for name, p in module.named_parameters()} | {"x": x.grad}
    return {name: global_value(grad) for name, grad in found.items() if grad is not None}


def both(way: str, mesh: Mesh) -> None:
    one = MLP(WAYS[way]).double()
    ours = parallelize(copy.deepcopy(one), mesh, PLAN)
    expected = gradients(one)
    for _ in range(2):
        ours.zero_grad()
        before = one.runs[0], ours.runs[0]
        torch.testing.assert_close(gradients(ours), expected, rtol=1e-10, atol=1e-10)
    assert way == "a module below" or ours.runs[0] - before[1] >= 2  # it has run again


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recomputed_gives_the_gradients_of_one_device(way: str) -> None:
    torch.manual_seed(0)
    both(way, SIMULATED)


def on_processes() -> None:
    mesh = worker_mesh((2,), ("tp",))
    for way in ("a method", "a closure"):
        torch.manual_seed(0)
        both(way, mesh)
    recomputes_layers(mesh)


def test_what_is_recomputed_on_processes_gives_the_gradients_of_one_device(gloo: Gloo) -> None:
    gloo(2).run(on_processes, timeout=100)


def recomputes_layers(mesh: Mesh, name: str = "llama") -> None:
    one, ours = make_model(name).double(), make_model(name).double()
    ours.activation_checkpointing_enable()
    parallelize(ours, mesh)
    for model in (one, ours):
        model.train()(**make_batch(name)).loss.backward()
    for key, value in ours.named_parameters():
        expected = one.get_parameter(key).grad
        torch.testing.assert_close(global_value(value.grad), expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("name", ["llama", "t5"])  # which makes leaves within a layer
def test_a_model_of_transformers_recomputes_its_layers(name: str) -> None:
    recomputes_layers(SIMULATED, name)


def test_a_choice_of_what_is_recomputed_is_refused() -> None:
    contexts = partial(create_selective_checkpoint_contexts, [])
    module = MLP(lambda self, x: again(self.inner, x, context_fn=contexts)).double()
    with told(TransformError):
        parallelize(module, SIMULATED, PLAN)(random((4, 8), 1))


def test_outside_of_a_parallelized_module_it_is_that_of_torch() -> None:
    one = MLP(WAYS["a method"]).double()
    gradients(one)
    assert one.runs == [2]


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.fc = nn.Embedding(16, 8), nn.Linear(8, 16, bias=False)
        self.double()

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.fc(self.embedding(ids))
        return y


def ties(mesh: Mesh) -> None:
    torch.manual_seed(0)
    one = Tied()
    ours = parallelize(
        copy.deepcopy(one), mesh, {"embedding": "embedding_colwise", "fc": "rowwise_rep"}
    )
    ids = torch.tensor([3, 0, 15])
    ours(ids)
    for module in (one, ours):
        module.fc.weight = module.embedding.weight
        module(ids).square().sum().backward()
    found, expected = (module.get_parameter("embedding.weight").grad for module in (ours, one))
    assert found is not None
    torch.testing.assert_close(global_value(found), expected)


def test_parameters_may_be_tied_after_parallelize(gloo: Gloo) -> None:
    ties(SIMULATED)
    gloo(2).run(ties_on_processes, timeout=60)


def ties_on_processes() -> None:
    ties(worker_mesh((2,), ("tp",)))

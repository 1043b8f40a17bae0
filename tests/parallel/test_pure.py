"""`functional`: a module as a pure function of its parameters."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardmap_torch import I, P, SpecError, all_reduce, functional, make_mesh, shard_map
from tests.parallel import models
from tests.programs.support.harness import random
from tests.support.golden import told


def gradients(function: Any, params: dict[str, Tensor], *args: Tensor) -> dict[str, Tensor]:
    def loss(params: dict[str, Tensor]) -> Tensor:
        out: Tensor = function(params, *args).square()
        return out.sum()

    found: dict[str, Tensor] = torch.func.grad(loss)(params)
    return found


@pytest.mark.parametrize("make", [models.mlp, models.encoder_layer, models.SelfAttention])
def test_apply_computes_what_the_module_computes_with_these_parameters(make: Any) -> None:
    module, other, x = make(), make(), random((2, 4, 8), 0)
    _, apply = functional(module)
    params, _ = functional(other)
    torch.testing.assert_close(apply(params, x), other(x))
    other(x).square().sum().backward()
    for name, grad in gradients(apply, params, x).items():
        torch.testing.assert_close(grad, other.get_parameter(name).grad)


def test_apply_runs_in_the_body_of_a_shard_map_under_global_strictness() -> None:
    module, x = models.mlp(), random((4, 8), 0)
    params, apply = functional(module)

    def loss(params: dict[str, Tensor], x: Tensor) -> Tensor:
        out: Tensor = apply(params, x)
        return all_reduce(out.square().sum(), "dp", dst=I)

    mesh = make_mesh((2,), ("dp",), kind="simulated")
    sharded = shard_map(loss, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P(), check="global")
    expected = gradients(apply, params, x)
    for name, grad in torch.func.grad(sharded)(params, x).items():
        torch.testing.assert_close(grad, expected[name])


def test_apply_is_checked_again_when_the_module_changes_its_mode() -> None:
    module = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)).double()
    params, apply = functional(module.eval())
    mesh = make_mesh((2,), ("dp",), kind="simulated")
    run = shard_map(apply, mesh=mesh, in_specs=P(), out_specs=P(), check="global")
    x = random((2, 4), 0)
    torch.testing.assert_close(run(params, x), module(x))
    module.train()
    kept = run(params, x) / module[0](x)
    assert bool(((kept - 2).abs() < 1e-9).logical_or(kept == 0).all())  # dropped, or doubled


class Careless(nn.Module):
    """Raises, or keeps what it has computed."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.mode = mode
        self.inner = nn.Linear(2, 2)
        self.cache: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.inner(x)
        if self.mode == "raise":
            raise KeyError("on purpose")
        if self.mode == "keep":
            self.cache = y
        if self.mode == "below":
            self.inner.scale = 2.0  # type: ignore[assignment]
        return y


def test_an_exception_leaves_the_module_as_it_was() -> None:
    module = Careless("raise")
    before = dict(module.named_parameters())
    params, apply = functional(module)
    with pytest.raises(KeyError, match="on purpose"):
        apply({name: torch.zeros_like(x) for name, x in params.items()}, torch.ones(1, 2))
    assert all(module.get_parameter(name) is x for name, x in before.items())


@pytest.mark.parametrize(("mode", "name"), [("keep", "cache"), ("below", "inner.scale")])
def test_a_forward_that_sets_attributes_is_refused(mode: str, name: str) -> None:
    params, apply = functional(Careless(mode))
    with told(SpecError):
        apply(params, torch.ones(1, 2))


def test_a_forward_that_writes_into_buffers_is_refused() -> None:
    params, apply = functional(nn.BatchNorm1d(2))
    with told(SpecError):
        apply(params, torch.randn(3, 2))


def test_parameters_are_given_by_name_and_all_of_them() -> None:
    params, apply = functional(nn.Linear(2, 2))
    with told(SpecError):
        apply({"weight": params["weight"], "wieght": params["weight"]}, torch.ones(1, 2))
    with pytest.raises(SpecError, match=r"^Linear: apply takes the parameters first, by name"):
        apply(torch.ones(1, 2), params)
    with pytest.raises(SpecError, match=r"^functional takes a torch\.nn\.Module, not a func"):
        functional(gradients)  # type: ignore[arg-type]


class Tied(nn.Module):
    """One parameter under two names, and a list that is no ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(6, 4)
        self.output = nn.Linear(4, 6, bias=False)
        self.output.weight = self.embedding.weight
        self.layers = [self.output]

    def forward(self, ids: Tensor) -> Tensor:
        y: Tensor = self.layers[0](self.embedding(ids))
        return y


def test_a_shared_parameter_stands_once_and_takes_both_gradients() -> None:
    module, ids = Tied().double(), torch.tensor([1, 3])
    params, apply = functional(module)
    assert list(params) == ["embedding.weight"]
    module(ids).square().sum().backward()
    grad = gradients(apply, params, ids)["embedding.weight"]
    torch.testing.assert_close(grad, module.embedding.weight.grad)


def test_modules_that_keep_lists_of_their_parameters_use_the_given_ones() -> None:
    module, x = nn.LSTM(3, 4).double(), random((5, 2, 3), 0)
    params, apply = functional(module)
    zeros = {name: torch.zeros_like(value) for name, value in params.items()}
    assert apply(zeros, x)[0].abs().max() == 0
    assert module(x)[0].abs().max() > 0

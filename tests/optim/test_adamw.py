"""Optimizers on shards step as torch's do on one device."""

import importlib
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from shardmap_torch import Mesh, OptimizerError, P
from shardmap_torch.optim import Optimizer, adamw, sgd
from tests.optim.training import AXES, MESH, assert_equal, params, synced, train, train_with_torch
from tests.programs.support.everywhere import ON_EVERY_MESH, run_on
from tests.support.golden import told
from tests.support.pool import Gloo

CASES: dict[str, tuple[Callable[[], Optimizer], Callable[..., Any], float | None]] = {
    "adamw": (partial(adamw, 0.1), partial(torch.optim.AdamW, lr=0.1), None),
    "adamw, clipped, betas": (
        partial(adamw, 0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
        partial(torch.optim.AdamW, lr=0.1, betas=(0.8, 0.9), eps=1e-3, weight_decay=0.3),
        0.5,
    ),
    "sgd": (partial(sgd, 0.01), partial(torch.optim.SGD, lr=0.01), None),
    "sgd, dampened": (
        partial(sgd, 0.01, momentum=0.9, dampening=0.3, weight_decay=0.2),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, dampening=0.3, weight_decay=0.2),
        0.5,
    ),
    "sgd, nesterov": (
        partial(sgd, 0.01, momentum=0.9, nesterov=True, weight_decay=0.2),
        partial(torch.optim.SGD, lr=0.01, momentum=0.9, nesterov=True, weight_decay=0.2),
        None,
    ),
}


def equals_torch(name: str, mesh: Mesh) -> None:
    make, make_torch, max_norm = CASES[name]
    expected = train_with_torch(make_torch, max_norm)
    assert_equal(train(mesh, make(), synced(make(), max_norm)), expected)


@pytest.mark.sample(5, "sgd, nesterov-vmap")
@ON_EVERY_MESH
@pytest.mark.parametrize("name", CASES)
def test_training_on_shards_equals_torch_on_one_device(kind: Any, name: str, gloo: Gloo) -> None:
    run_on(kind, partial(equals_torch, name), gloo, MESH, AXES)


def two_steps(optimizer: Optimizer, weights: Any, grads: Any) -> Any:
    state = optimizer.init(weights)
    for _ in range(2):
        weights, state = optimizer.update(weights, grads, state)
    return weights


def test_only_parameters_that_decay_are_decayed() -> None:
    weights = {"w": torch.ones(2, 2), "b": torch.ones(2)}
    zeros = {name: torch.zeros_like(value) for name, value in weights.items()}
    for decays in (lambda p: p.ndim > 1, {"w": True, "b": False}):
        for optimizer in (
            adamw(0.5, weight_decay=0.5, decays=decays),
            sgd(0.5, weight_decay=0.5, decays=decays),
        ):
            moved = two_steps(optimizer, weights, zeros)
            assert moved["w"].equal(torch.full((2, 2), 0.75**2))
            assert moved["b"].equal(weights["b"])


def test_moments_of_low_precision_parameters_can_be_wider() -> None:
    weights = {"w": torch.full((4,), 1.0, dtype=torch.bfloat16)}
    optimizer = adamw(0.01, state_dtype=torch.float32)
    state = optimizer.init(weights)
    assert state["exp_avg"]["w"].dtype == torch.float32
    grads = {"w": torch.full((4,), 3.0, dtype=torch.bfloat16)}
    weights, state = optimizer.update(weights, grads, state)
    assert weights["w"].dtype == torch.bfloat16
    # In bfloat16 the second moment, 0.001 * 9, would be off by up to 2**-9 of itself.
    torch.testing.assert_close(state["exp_avg_sq"]["w"], torch.full((4,), 0.009), rtol=1e-6, atol=0)


def test_scalar_parameters_keep_their_dtype() -> None:
    weights = {"w": torch.ones(())}
    for optimizer in (adamw(0.1), sgd(lambda step: 0.1 * step)):
        assert two_steps(optimizer, weights, weights)["w"].dtype == torch.float32


def test_nothing_is_written_in_place() -> None:
    weights = params()
    before = {name: value.clone() for name, value in weights.items()}
    for optimizer in (adamw(0.1), sgd(0.1, momentum=0.9, weight_decay=0.1)):
        state = optimizer.init(weights)
        optimizer.update(weights, weights, state)
        assert all(weights[name].equal(value) for name, value in before.items())
        assert all(not leaf.any() for leaf in state["step"].reshape(1))


def test_a_scalar_that_is_read_gives_the_same_bits_as_one_that_stays_a_tensor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    optimizer = adamw(0.3, weight_decay=0.2, decays=lambda p: p.ndim > 1)
    # Two tensors without dims would be multiplied in the wider dtype.
    start = {name: p.float() for name, p in params().items() if p.ndim}
    grads = {name: p.cos() for name, p in start.items()}

    def train() -> list[torch.Tensor]:
        at, state = start, optimizer.init(start)
        for _ in range(3):
            at, state = optimizer.update(at, grads, state)
        return [leaf for tree in (at, state["exp_avg"]) for leaf in tree.values()]

    monkeypatch.setattr(importlib.import_module("shardmap_torch.optim.lists"), "_DEVICES", ())
    read = train()
    monkeypatch.setattr(importlib.import_module(adamw.__module__), "as_number", lambda x: x)
    assert all(map(torch.equal, read, train()))


def test_an_empty_tree_has_an_empty_step() -> None:
    assert two_steps(adamw(0.1), {}, {}) == {}


def test_the_specs_of_the_state_are_those_of_the_parameters() -> None:
    specs = {"w": P("tp")}
    assert adamw().specs(specs) == {"step": P(), "exp_avg": specs, "exp_avg_sq": specs}
    assert sgd().specs(specs) == {"step": P()}
    assert sgd(momentum=0.9).specs(specs) == {"step": P(), "momentum_buffer": specs}


W = torch.ones(2)
ERRORS: dict[str, Callable[[], Any]] = {
    "betas": lambda: adamw(-1.0, betas=(1.0, 0.9), weight_decay=-2.0),
    "rate": lambda: sgd(-1.0),
    "nesterov": lambda: sgd(nesterov=True),
    "dtype": lambda: adamw().init(
        {"a": torch.ones(2, dtype=torch.int64), "b": [W.to(torch.complex64)], "c": W}
    ),
    "tree": lambda: two_steps(adamw(), {"a": W, "b": W}, {"a": W, "b": None, "c": W}),
    "shape": lambda: two_steps(adamw(), {"a": W}, {"a": torch.ones(3)}),
    "moments": lambda: adamw().update({"a": W}, {"a": W}, adamw().init({"a": torch.ones(3)})),
    "decays": lambda: two_steps(adamw(decays={"a": True}), {"a": W, "b": W}, {"a": W, "b": W}),
}


@pytest.mark.parametrize("name", ERRORS)
def test_what_no_optimizer_can_do_is_an_error(name: str) -> None:
    make = ERRORS[name]
    with told(OptimizerError):
        make()


def test_optimizers_are_shown_as_the_calls_that_make_them() -> None:
    shown = "adamw(lr=0.1, weight_decay=0.01, decays=True, state_dtype=None, betas=(0.9, 0.999), "
    assert repr(adamw(0.1)) == f"{shown}eps=1e-08)"
    assert repr(sgd(0.1)).startswith("sgd(lr=0.1, weight_decay=0.0, ")


def test_gradients_with_their_norm_are_told_from_gradients() -> None:
    tree, optimizer = {"w": torch.ones(2)}, adamw(0.1)
    with told(OptimizerError):
        optimizer.update(tree, (tree, torch.ones(())), optimizer.init(tree))

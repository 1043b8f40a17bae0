"""A two-layer network with data, tensor and sequence parallelism, trained for a few steps.

`scale` is used by each rank of "tp" on other positions, so its gradient is pending over "tp" too.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardmap_torch import I, Mesh, P, R, all_gather, all_reduce, full, reduce_scatter, shard_map
from shardmap_torch.optim import Optimizer, clip_by_global_norm, sync_gradients
from tests.programs.support.harness import random

Params = dict[str, Tensor]
MESH, AXES = (2, 2), ("dp", "tp")
NUM_STEPS = 3
SPECS = {
    "scale": P(replicate={"tp"}),
    "w1": P(None, "tp"),
    "b1": P("tp"),
    "w2": P("tp"),
    "gain": P(replicate={"tp"}),
}
# The ranks add the same float64 numbers in another order, in a few steps.
EXACT = 1e-10


def params() -> Params:
    shapes = {"scale": (6,), "w1": (6, 8), "b1": (8,), "w2": (8, 6), "gain": ()}
    return {name: random(shape, seed) for seed, (name, shape) in enumerate(shapes.items())}


def batch(step: int) -> Tensor:
    """[sequences, positions, width]; over "tp" the positions are sharded."""
    return random((4, 2, 6), 100 + step)


def loss(weights: Params, x: Tensor) -> Tensor:
    """On one rank: x [b/dp, t/tp, d]."""
    h = all_gather(x * weights["scale"], "tp", dim=1, dst=R)
    h = torch.tanh(h @ weights["w1"] + weights["b1"])
    y = reduce_scatter(h @ weights["w2"], "tp", dim=1)
    return all_reduce((y * weights["gain"] - x).square().sum(), ("dp", "tp"), dst=I)


def loss_on_one_device(weights: Params, x: Tensor) -> Tensor:
    h = torch.tanh((x * weights["scale"]) @ weights["w1"] + weights["b1"])
    return (h @ weights["w2"] * weights["gain"] - x).square().sum()


Update = Callable[[Params, Params, Any], tuple[Params, Any]]


def synced(optimizer: Optimizer, max_norm: float | None, **options: Any) -> Update:
    """Gradients all-reduced in buckets, clipped, and then `optimizer`."""

    def update(weights: Params, grads: Params, state: Any) -> tuple[Params, Any]:
        grads = sync_gradients(grads, SPECS, "dp", **options)
        if max_norm is not None:
            grads, _ = clip_by_global_norm(grads, SPECS, max_norm)
        return optimizer.update(weights, grads, state)

    return update


def train(mesh: Mesh, optimizer: Optimizer, update: Update, check: Any = "global") -> Params:
    """The parameters after a few steps, as plain global tensors."""
    specs = {name: P(*spec.entries) for name, spec in SPECS.items()}
    lies = (specs, optimizer.specs(specs))

    @shard_map(mesh=mesh, in_specs=(*lies, P("dp", "tp")), out_specs=lies, check=check)
    def step(weights: Params, state: Any, x: Tensor) -> tuple[Params, Any]:
        return update(weights, torch.func.grad(loss)(weights, x), state)

    weights = params()
    state = optimizer.init(weights)
    for number in range(NUM_STEPS):
        weights, state = step(weights, state, batch(number))
    return full(weights)


def train_with_torch(make: Callable[[list[Tensor]], Any], max_norm: float | None) -> Params:
    """Trains on one device, by an optimizer of torch."""
    weights = {name: value.requires_grad_() for name, value in params().items()}
    optimizer = make(list(weights.values()))
    for number in range(NUM_STEPS):
        optimizer.zero_grad()
        loss_on_one_device(weights, batch(number)).backward()
        if max_norm is not None:
            grads = [w.grad for w in weights.values() if w.grad is not None]
            norm = torch.cat([grad.flatten() for grad in grads]).norm()
            for grad in grads:
                grad *= (max_norm / norm).clamp(max=1)
        optimizer.step()
    return {name: value.detach() for name, value in weights.items()}


def assert_equal(actual: Params, expected: Params) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(actual[name], value, rtol=EXACT, atol=EXACT, msg=name)

"""Fine-tuning a Llama: a step over "dp" and "tp", and the same steps on one device."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from examples.llama import model, plain
from examples.llama.model import Config, Params
from shardmap_torch import Mesh, P, device_put, shard_map, value_and_grad
from shardmap_torch.optim import Optimizer, adamw, shard_over, zero

AXES = ("dp", "tp")
MAX_NORM = 1.0

State: TypeAlias = Any
"""Parameters and the optimizer's moments: what a checkpoint holds."""

Batches: TypeAlias = Iterable[Tensor]
"""Tokens [b, t + 1], the same on every rank."""


def make_optimizer(mesh: Mesh, config: Config, params: Params, rate: float) -> Optimizer:
    """AdamW whose moments are sharded over "dp" too (ZeRO); it sums and clips gradients."""
    specs = model.specs(config)
    shards = shard_over(params, specs, "dp", mesh)
    return zero(adamw(rate, weight_decay=0.0), specs, shards, "dp", max_norm=MAX_NORM)


def initial(mesh: Mesh, config: Config, params: Params, optimizer: Optimizer) -> State:
    """Places global parameters, and moments of zeros."""
    specs = model.specs(config)
    state = {"params": params, "optimizer": optimizer.init(params)}
    return device_put(state, mesh, {"params": specs, "optimizer": optimizer.specs(specs)})


def train(
    mesh: Mesh, config: Config, optimizer: Optimizer, state: State, batches: Batches
) -> tuple[State, list[float]]:
    """Runs a step for each batch; returns the new state, and the losses."""
    step, losses = sharded_step(mesh, config, optimizer), []
    for batch in batches:
        placed = device_put(batch, mesh, P("dp"))
        params, moments, loss = step(state["params"], state["optimizer"], placed)
        state = {"params": params, "optimizer": moments}
        losses.append(loss.item())
    return state, losses


def sharded_step(mesh: Mesh, config: Config, optimizer: Optimizer) -> Callable[..., Any]:
    """One step, from gradients to new parameters, in one body."""
    specs = model.specs(config)
    state_specs = optimizer.specs(specs)

    @shard_map(
        mesh=mesh,
        in_specs=(specs, state_specs, P("dp")),
        out_specs=(specs, state_specs, P()),
        check="global",
    )
    def step(params: Params, state: Any, batch: Tensor) -> tuple[Params, Any, Tensor]:
        loss, grads = value_and_grad(model.loss)(params, batch, config)
        params, state = optimizer.update(params, grads, state)
        return params, state, loss

    return step


def sharded_loss(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Mean nats a token of a batch."""
    body = partial(model.loss, config=config)
    specs = model.specs(config)
    return shard_map(body, mesh=mesh, in_specs=(specs, P("dp")), out_specs=P(), check="global")


def train_on_one_device(
    config: Config, params: Params, batches: Batches, rate: float
) -> tuple[Params, list[float]]:
    """Does the same with the plain model and torch's own optimizer."""
    params = optree.tree_map(lambda p: p.detach().clone().requires_grad_(), params)
    leaves: list[Tensor] = optree.tree_leaves(params)
    optimizer = torch.optim.AdamW(leaves, lr=rate, weight_decay=0.0)
    losses = []
    for batch in batches:
        loss = plain.loss(params, batch, config)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(leaves, MAX_NORM)
        optimizer.step()
        losses.append(loss.item())
    return params, losses

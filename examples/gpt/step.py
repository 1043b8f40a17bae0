"""The train step: one pure function on one rank, and shard_map makes it a global one."""

from collections.abc import Callable
from functools import partial
from typing import Any, Literal, TypeAlias

from torch import Tensor

from examples.gpt import model, pipeline
from examples.gpt.model import Config, Params
from shardmap_torch import (
    I,
    Mesh,
    P,
    all_gather,
    axis_size,
    broadcast,
    shard_map,
    value_and_grad,
)
from shardmap_torch.optim import Optimizer, sync_gradients

State: TypeAlias = Any
LossAndGrads = Callable[[Params, Tensor], tuple[Tensor, Params]]
Step = Callable[[Params, State, Tensor], tuple[Params, State, Tensor]]


def loss_and_grads(params: Params, batch: Tensor, config: Config) -> tuple[Tensor, Params]:
    """Returns the loss, and the reduced gradient of this rank's shard of every parameter."""
    value, grads = _value_and_grad(params, batch, config)
    return value, sync_gradients(grads, model.specs(config), config.parallel.pending)


def _value_and_grad(params: Params, batch: Tensor, config: Config) -> tuple[Tensor, Params]:
    """The loss, and this rank's addend of every gradient over `Parallel.pending`."""
    if config.parallel.has_stages:
        return pipeline.value_and_grad(params, batch, config)
    value, grads = value_and_grad(model.loss)(params, batch, config)
    return value, grads


def sharded_loss_and_grads(mesh: Mesh, config: Config) -> LossAndGrads:
    """`loss_and_grads` of global values."""
    specs = model.specs(config)
    body = partial(loss_and_grads, config=config)
    return shard_map(body, mesh=mesh, in_specs=(specs, P("dp")), out_specs=(P(), specs))


def sharded_step(
    mesh: Mesh,
    config: Config,
    optimizer: Optimizer,
    check: Literal["local", "global"] = "local",
    replay: bool = False,
) -> Step:
    """One step of training, from gradients to new parameters, in one body."""
    specs = model.specs(config)
    state_specs = optimizer.specs(specs)
    in_specs, out_specs = (specs, state_specs, P("dp")), (specs, state_specs, P())

    @shard_map(mesh=mesh, in_specs=in_specs, out_specs=out_specs, check=check, replay=replay)
    def step(params: Params, state: State, batch: Tensor) -> tuple[Params, State, Tensor]:
        loss, grads = _value_and_grad(params, batch, config)
        params, state = optimizer.update(params, grads, state)
        return params, state, loss

    return step


def sharded_loss(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Mean nats a token of a batch."""
    body = partial(model.loss, config=config)
    return shard_map(body, mesh=mesh, in_specs=(model.specs(config), P("dp")), out_specs=P())


def sharded_logits(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Logits [b, t, v] that stay sharded, over all axes."""
    return shard_map(
        partial(model.apply, config=config),
        mesh=mesh,
        in_specs=(model.specs(config), P(*config.parallel.data)),
        out_specs=logits_spec(config),
    )


def logits_spec(config: Config) -> P:
    """Returns how the logits [b, t, v] lie."""
    return P("dp", config.parallel.context, "tp")


def sharded_next_logits(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Returns logits [b, v] of the token after the last, gathered on every rank."""
    context = config.parallel.context

    @shard_map(mesh=mesh, in_specs=(model.specs(config), P(*config.parallel.data)), out_specs=P())
    def next_logits(params: Params, tokens: Tensor) -> Tensor:
        logits = model.apply(params, tokens, config)[:, -1]  # [b/dp, v/tp]
        if context:  # the last position is the last rank's
            logits = broadcast(logits, context, axis_size(context) - 1, dst=I)
        return all_gather(all_gather(logits, "tp", dim=1, dst=I), "dp", dst=I)

    return next_logits

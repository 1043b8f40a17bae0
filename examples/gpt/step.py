"""The train step: one pure function on one rank, and shard_map makes it a global one."""

from collections.abc import Callable
from functools import partial

from torch import Tensor

from examples.gpt import model
from examples.gpt.model import Config, Params
from examples.gpt.optim import AdamW, State, clip
from shardmap_torch import I, Mesh, P, all_gather, shard_map, value_and_grad
from shardmap_torch.kernels import Overlap

LossAndGrads = Callable[[Params, Tensor], tuple[Tensor, Params]]
Step = Callable[[Params, State, Tensor], tuple[Params, State, Tensor]]


def loss_and_grads(
    params: Params, batch: Tensor, overlap: Overlap = "off"
) -> tuple[Tensor, Params]:
    """The loss, and the whole gradient of this rank's piece of every parameter."""
    value, grads = value_and_grad(model.loss)(params, batch, overlap)
    return value, grads


def sharded_loss_and_grads(mesh: Mesh, config: Config) -> LossAndGrads:
    """`loss_and_grads` of global values."""
    cuts = model.specs(config)
    body = partial(loss_and_grads, overlap=config.overlap)
    return shard_map(body, mesh=mesh, in_specs=(cuts, P("dp")), out_specs=(P(), cuts))


def sharded_step(mesh: Mesh, config: Config, optimizer: AdamW) -> Step:
    """One step of training, from gradients to new parameters, in one body."""
    cuts = model.specs(config)
    state_specs = optimizer.specs(cuts)

    @shard_map(mesh=mesh, in_specs=(cuts, state_specs, P("dp")), out_specs=(cuts, state_specs, P()))
    def step(params: Params, state: State, batch: Tensor) -> tuple[Params, State, Tensor]:
        loss, grads = loss_and_grads(params, batch, config.overlap)
        grads, _ = clip(grads, cuts, optimizer.max_norm)
        params, state = optimizer.update(params, grads, state)
        return params, state, loss

    return step


def sharded_loss(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Mean nats a token of a batch."""
    body = partial(model.loss, overlap=config.overlap)
    return shard_map(body, mesh=mesh, in_specs=(model.specs(config), P("dp")), out_specs=P())


def sharded_logits(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Logits [b, t, v] that stay cut, the batch over "dp" and the vocabulary over "tp"."""
    return shard_map(
        partial(model.apply, overlap=config.overlap),
        mesh=mesh,
        in_specs=(model.specs(config), P("dp")),
        out_specs=P("dp", None, "tp"),
    )


def sharded_next_logits(mesh: Mesh, config: Config) -> Callable[[Params, Tensor], Tensor]:
    """Logits [b, v] of the token after the last, whole on every rank."""

    @shard_map(mesh=mesh, in_specs=(model.specs(config), P("dp")), out_specs=P())
    def next_logits(params: Params, tokens: Tensor) -> Tensor:
        logits = model.apply(params, tokens, config.overlap)[:, -1]  # [b/dp, v/tp]
        return all_gather(all_gather(logits, "tp", dim=1, dst=I), "dp", dst=I)

    return next_logits

"""The loss and its gradients where the layers are the stages of a pipeline, over "pp".

The embedding comes before the first stage, the final norm, the unembedding and the loss after the
last one. All ranks of "pp" have the embedding and the head; the gradients are equal on them.

With FSDP a step gathers the parameters once, before the first microbatch, and reduce-scatters the
gradients once, after the last one, as torchtitan does: between the two a rank has the parameters of
its stage in memory. Without, gradients are summed over "dp" once, too.
"""

import torch
from torch import Tensor

from examples.gpt import model
from examples.gpt.layers import embed
from examples.gpt.model import BALANCE, Config, Params
from shardmap_torch import I, Partial, all_reduce, axis_size, convert, nn, vjp


def value_and_grad(params: Params, batch: Tensor, config: Config) -> tuple[Tensor, Params]:
    """Computes what `shardmap_torch.value_and_grad(model.loss)` does for other choices.

    The sequences of each rank of "dp" are a number of microbatches, in the order of 1F1B. Experts
    get even loads in each microbatch of all ranks of "dp".
    """
    parallel = config.parallel
    tokens, targets = model.own_positions(batch, parallel)
    num_tokens = targets.numel() * axis_size(parallel.data)
    specs = model.specs(config)
    used, pull = vjp(lambda shards: model.gathered(shards, specs, parallel), params)
    tables = model.angles(tokens, used["embedding"].dtype, config)
    x, pull_table = vjp(lambda table: embed(tokens, table, parallel), used["embedding"])

    def stage(layers: Params, x: Tensor) -> tuple[Tensor, ...]:
        balances: list[Tensor] = []
        for layer in model.unstack_layers(layers):
            x, balance = model.block(x, layer, tables, config, lambda made: made)
            balances += balance
        if not balances:
            return (x,)
        unevenness = BALANCE * torch.stack(balances).sum() / config.microbatches
        return x, convert(unevenness, parallel.data, src=I, dst=Partial)

    def loss(head: Params, x: Tensor, targets: Tensor) -> Tensor:
        logits = model.unembed(x, head, config)
        nats = nn.vocab_parallel_cross_entropy(
            logits, targets, "tp", reduction="sum", ignore_index=None
        )
        mean: Tensor = nats / num_tokens
        return mean

    def microbatches(x: Tensor) -> Tensor:
        """[b, ...] -> [m, b/m, ...]."""
        parts: Tensor = x.unflatten(0, (-1, config.microbatches)).transpose(0, 1)
        return parts

    value, (d_layers, d_head), d_x = nn.pipeline_value_and_grad(
        stage,
        loss,
        used["layers"],
        microbatches(x),
        microbatches(targets),
        "pp",
        head=model.head(used),
    )
    (d_table,) = pull_table(d_x.transpose(0, 1).flatten(0, 1))
    grads = {"embedding": d_table, "layers": d_layers, **d_head}
    (d_params,) = pull({name: grads[name] for name in params})
    return all_reduce(value, parallel.data, dst=I), d_params

"""The loss and its gradients where the layers are the stages of a pipeline, over "pp".

The embedding comes before the first stage, the final norm, the unembedding and the loss after the
last one. All ranks of "pp" have the embedding and the head; the gradients are equal on them.
"""

from torch import Tensor

from examples.gpt import model
from examples.gpt.layers import embed
from examples.gpt.model import Config, Params
from shardmap_torch import I, R, all_reduce, axis_size, convert, nn, vjp


def value_and_grad(params: Params, batch: Tensor, config: Config) -> tuple[Tensor, Params]:
    """Computes what `shardmap_torch.value_and_grad(model.loss)` does for other choices.

    The sequences of each rank of "dp" are a number of microbatches, in the order of 1F1B.
    """
    data = config.parallel.data
    tokens, targets = model.own_positions(batch, config.parallel)
    num_tokens = targets.numel() * axis_size(data)
    x, pull = vjp(lambda table: embed(tokens, table, config.parallel), params["embedding"])

    def stage(layers: Params, x: Tensor) -> Tensor:
        for layer in model.unstack_layers(layers):
            x, _ = model.block(x, layer, config, lambda made: made)
        return x

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

    layers, head = convert((params["layers"], model.head(params)), data, src=I, dst=R)
    value, (d_layers, d_head), d_x = nn.pipeline_value_and_grad(
        stage, loss, layers, microbatches(x), microbatches(targets), "pp", head=head
    )
    (d_table,) = pull(d_x.transpose(0, 1).flatten(0, 1))
    grads = {"embedding": d_table, "layers": d_layers, **d_head}
    return all_reduce(value, data, dst=I), {name: grads[name] for name in params}

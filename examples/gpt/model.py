"""The GPT: its parameters as a pytree, their shardings, and the forward and loss."""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor
from torch.nn import functional

from examples.gpt.dropout import Dropout
from examples.gpt.layers import (
    Tables,
    causal_attention,
    column,
    cross_entropy,
    embed,
    experts,
    rms_norm,
    rotary_tables,
    row,
)
from examples.gpt.parallel import DEFAULT, Parallel
from shardmap_torch import I, V, all_gather, convert, match_specs, nn
from shardmap_torch.kernels import Overlap

Params: TypeAlias = Any
"""A pytree of tensors, or of what belongs to each: gradients, specs."""


BALANCE = 0.01
"""Weight of the loss by which experts get even loads."""


@dataclass(frozen=True)
class Config:
    """Sizes; over n ranks of "tp", n divides length, heads, hidden and vocabulary.

    `parallel` says how ranks share the work, `overlap` whether the layers' communication hides
    behind their matmuls.
    """

    vocabulary: int = 256  # one token a byte
    length: int = 64
    width: int = 128
    heads: int = 8
    hidden: int = 384
    layers: int = 3
    experts: int = 4  # of each layer; with "ep" only
    microbatches: int = 4  # of the sequences of a rank of "dp"; with "pp" only
    overlap: Overlap = "off"
    parallel: Parallel = DEFAULT

    @property
    def num_microbatches(self) -> int:
        """Returns into how many the sequences of a rank of "dp" are divided."""
        return self.microbatches if self.parallel.has_stages else 1


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Global parameters; drawn in float64, so that every dtype starts from the same values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, inputs: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (drawn / math.sqrt(inputs)).to(dtype)

    d, h, f, v = config.width, config.heads, config.hidden, config.vocabulary
    e = (config.experts,) if config.parallel.has_experts else ()
    deep = 2 * config.layers  # so many branches are added up in the residual stream

    def layer() -> dict[str, Tensor]:
        return {
            "attention_norm": torch.ones(d, dtype=dtype),
            "qkv": normal(d, h, 3, d // h, inputs=d),
            "attention_out": normal(h, d // h, d, inputs=d * deep),
            "mlp_norm": torch.ones(d, dtype=dtype),
            **({"router": normal(d, *e, inputs=d)} if e else {}),
            "gate_up": normal(*e, d, 2, f, inputs=d),
            "down": normal(*e, f, d, inputs=f * deep),
        }

    params = {
        "embedding": normal(v, d, inputs=d),
        "layers": [layer() for _ in range(config.layers)],
        "final_norm": torch.ones(d, dtype=dtype),
        "unembedding": normal(d, v, inputs=d),
    }
    return stack_layers(params) if config.parallel.has_stages else params


def stack_layers(params: Params) -> Params:
    """Makes the layers one pytree, whose leaves have a leading dimension for them."""
    stacked = optree.tree_map(lambda *leaves: torch.stack(leaves), *params["layers"])
    return {**params, "layers": stacked}


def unstack_layers(layers: Params) -> list[Params]:
    """Gives each layer its part of such leaves."""
    columns = zip(*(leaf.unbind() for leaf in layers.values()), strict=True)
    return [dict(zip(layers, column, strict=True)) for column in columns]


@lru_cache
def specs(config: Config) -> Params:
    """Returns how the parameters are sharded."""
    return match_specs(init(config), config.parallel.params)


@lru_cache
def moment_specs(config: Config) -> Params:
    """Returns how the moments are sharded that the optimizer keeps of the parameters."""
    return match_specs(init(config), config.parallel.moments)


def apply(params: Params, tokens: Tensor, config: Config, dropout: Dropout | None = None) -> Tensor:
    """Tokens [b, t] -> logits [b, t, v/tp], on one rank."""
    return forward(params, tokens, config, dropout)[0]


def forward(
    params: Params, tokens: Tensor, config: Config, dropout: Dropout | None = None
) -> tuple[Tensor, list[Tensor]]:
    """Computes the logits, and how uneven the loads of each layer's experts are."""
    parallel = config.parallel
    drop = (dropout or Dropout()).shards(parallel.activations)
    specs = _looked_up(params, config)
    first = gathered(params["embedding"], specs["embedding"], parallel)
    x = drop(embed(tokens, first, parallel))  # [b, t/tp, d]
    tables = angles(tokens, x.dtype, config)
    balances: list[Tensor] = []
    for layer in _layers(params, config):
        x, balance = block(x, layer, tables, config, drop)
        balances += balance
    last = gathered(head(params), head(specs), parallel)
    return unembed(x, last, config), balances


def _looked_up(params: Params, config: Config) -> Params:
    """The specs for `gathered`, which torch.compile cannot trace; without FSDP it reads none."""
    return specs(config) if config.parallel.has_sharded_params else params


def head(params: Params) -> Params:
    """The part of the parameters that comes after the layers."""
    return {name: params[name] for name in ("final_norm", "unembedding")}


def unembed(x: Tensor, last: Params, config: Config) -> Tensor:
    """x [b, t/tp, d] -> logits [b, t, v/tp]."""
    normed = rms_norm(x, last["final_norm"])
    return column(normed, last["unembedding"], config.parallel, config.overlap)


def _layers(params: Params, config: Config) -> Iterator[Params]:
    """Yields this rank's shards of each layer; those of FSDP and of stages are gathered."""
    parallel, layers = config.parallel, params["layers"]
    specs = _looked_up(params, config)["layers"]
    if parallel.has_stages:
        yield from unstack_layers(all_gather(gathered(layers, specs, parallel), "pp", dst=I))
        return
    for shards, each in zip(layers, specs, strict=True):
        yield gathered(shards, each, parallel)


def angles(tokens: Tensor, dtype: torch.dtype, config: Config) -> Tables:
    """Computes what all layers turn queries and keys of activations of this dtype by."""
    return rotary_tables(tokens, config.width // config.heads, dtype, config.parallel)


def block(
    x: Tensor, layer: Params, tables: Tables, config: Config, drop: Callable[[Tensor], Tensor]
) -> tuple[Tensor, list[Tensor]]:
    """x [b, t/tp, d] -> the same after one layer, and how uneven its experts' loads are."""
    parallel, overlap = config.parallel, config.overlap
    attended = _attention(x, layer, tables, config)
    x = x + drop(row(attended, layer["attention_out"], parallel, overlap))
    normed = rms_norm(x, layer["mlp_norm"])
    balances: list[Tensor] = []
    if parallel.has_experts:
        made, balance = experts(normed, layer, parallel)
        balances.append(balance)
    else:
        gate, up = column(normed, layer["gate_up"], parallel, overlap).unbind(-2)
        made = row(functional.silu(gate) * up, layer["down"], parallel, overlap)
    return x + drop(made), balances


def _attention(x: Tensor, layer: Params, tables: Tables, config: Config) -> Tensor:
    """x [b, t/tp, d] -> [b, t, h/tp, k]."""
    normed = rms_norm(x, layer["attention_norm"])
    q, k, v = column(normed, layer["qkv"], config.parallel, config.overlap).unbind(-2)
    return causal_attention(q, k, v, tables, config.parallel)


def gathered(shards: Params, specs: Params, parallel: Parallel) -> Params:
    """With FSDP, the parameters of which each rank of "dp" holds a part, of experts of "edp"."""
    if not parallel.has_sharded_params:
        return shards
    leaves, structure = optree.tree_flatten(shards)
    by_leaf = optree.tree_leaves(specs)
    for axis in ("dp", "edp"):
        mine = {at: spec for at, spec in enumerate(by_leaf) if axis in spec.mentioned}
        for at, leaf in nn.fsdp_gather({at: leaves[at] for at in mine}, mine, axis).items():
            leaves[at] = leaf
    return optree.tree_unflatten(structure, leaves)


def loss(params: Params, batch: Tensor, config: Config, dropout: Dropout | None = None) -> Tensor:
    """Batch [b/dp, t+1] -> mean nats a token over the global batch, equal on all ranks.

    With experts, and the loss by which they get even loads.

    Gradients of parameters are each rank's addend over `parallel.pending`.
    """
    tokens, targets = own_positions(batch, config.parallel)
    logits, balances = forward(params, tokens, config, dropout)
    value = cross_entropy(logits, targets, config.parallel)
    return value + BALANCE * torch.stack(balances).sum() if balances else value


def own_positions(batch: Tensor, parallel: Parallel) -> tuple[Tensor, Tensor]:
    """Batch [b, t+1] -> tokens and targets [b, t/cp]."""
    tokens, targets = batch[:, :-1], batch[:, 1:]
    axis = parallel.context
    if axis is None:
        return tokens, targets
    parts: tuple[Tensor, Tensor] = convert((tokens, targets), axis, src=I, dst=V, dim=1)
    return parts

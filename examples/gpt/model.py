"""The GPT: its parameters as a pytree, how they are cut, and what they compute."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from examples.gpt.dropout import Dropout
from examples.gpt.layers import causal_attention, column, cross_entropy, embed, rms_norm, row
from shardmap_torch import I, P, R, convert
from shardmap_torch.kernels import Overlap

Params: TypeAlias = Any
"""A pytree of tensors, or of what belongs to each: gradients, specs."""


@dataclass(frozen=True)
class Config:
    """Sizes; over n ranks of "tp", n divides length, heads, hidden and vocabulary.

    `overlap` says whether the layers' communication hides behind their matmuls.
    """

    vocabulary: int = 256  # one token a byte
    length: int = 64
    width: int = 128
    heads: int = 8
    hidden: int = 384
    layers: int = 3
    overlap: Overlap = "off"


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Global parameters; drawn in float64, so that every dtype starts from the same values."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int, inputs: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        return (drawn / math.sqrt(inputs)).to(dtype)

    d, h, f, v = config.width, config.heads, config.hidden, config.vocabulary
    deep = 2 * config.layers  # so many branches are added up in the residual stream

    def layer() -> dict[str, Tensor]:
        return {
            "attention_norm": torch.ones(d, dtype=dtype),
            "qkv": normal(d, h, 3, d // h, inputs=d),
            "attention_out": normal(h, d // h, d, inputs=d * deep),
            "mlp_norm": torch.ones(d, dtype=dtype),
            "gate_up": normal(d, 2, f, inputs=d),
            "down": normal(f, d, inputs=f * deep),
        }

    return {
        "embedding": normal(v, d, inputs=d),
        "layers": [layer() for _ in range(config.layers)],
        "final_norm": torch.ones(d, dtype=dtype),
        "unembedding": normal(d, v, inputs=d),
    }


def specs(config: Config) -> Params:
    """How the parameters are cut: over "tp" only; every rank of "dp" holds the same."""
    layer = {
        "attention_norm": P(),
        "qkv": P(None, "tp"),
        "attention_out": P("tp"),
        "mlp_norm": P(),
        "gate_up": P(None, None, "tp"),
        "down": P("tp"),
    }
    return {
        "embedding": P("tp"),
        "layers": [layer] * config.layers,
        "final_norm": P(),
        "unembedding": P(None, "tp"),
    }


def apply(
    params: Params, tokens: Tensor, overlap: Overlap = "off", dropout: Dropout | None = None
) -> Tensor:
    """Tokens [b, t] -> logits [b, t, v/tp], on one rank."""
    drop = (dropout or Dropout()).shards(("dp", "tp"))
    x = drop(embed(tokens, params["embedding"]))  # [b, t/tp, d]
    for layer in params["layers"]:
        q, k, v = column(rms_norm(x, layer["attention_norm"]), layer["qkv"], overlap).unbind(-2)
        x = x + drop(row(causal_attention(q, k, v), layer["attention_out"], overlap))
        gate, up = column(rms_norm(x, layer["mlp_norm"]), layer["gate_up"], overlap).unbind(-2)
        x = x + drop(row(functional.silu(gate) * up, layer["down"], overlap))
    return column(rms_norm(x, params["final_norm"]), params["unembedding"], overlap)


def loss(
    params: Params, batch: Tensor, overlap: Overlap = "off", dropout: Dropout | None = None
) -> Tensor:
    """Batch [b/dp, t+1] -> mean nats a token over the whole batch, equal on all ranks.

    Each rank of "dp" uses the parameters on other sequences: R, so gradients are summed over "dp".
    """
    params = convert(params, "dp", src=I, dst=R)
    return cross_entropy(apply(params, batch[:, :-1], overlap, dropout), batch[:, 1:])

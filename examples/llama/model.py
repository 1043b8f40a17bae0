"""Llama: its sizes, its parameters as a pytree, how they are sharded, and what they compute.

b sequences   t new positions   s cached positions   d model width   v vocabulary
g key heads   r query heads for each   k head width   f hidden width
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import gcd
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional

from shardmap_torch import I, P, SpecError, all_gather
from shardmap_torch.errors import listing
from shardmap_torch.nn import (
    attention,
    column_linear,
    kv_update,
    positions,
    rms_norm,
    rotary,
    rotary_tables,
    row_linear,
    vocab_parallel_embedding,
    vocab_parallel_linear_cross_entropy,
)

Params: TypeAlias = Any
"""A pytree of tensors, or of their specs."""

Attend: TypeAlias = Callable[[Tensor, Tensor, Tensor], Tensor]

Cache: TypeAlias = list[Tensor]
"""Keys and values of each layer, [b, s, g, 2, k]."""


@dataclass(frozen=True)
class Config:
    """Sizes; the ranks of "tp" must divide key heads, hidden width and vocabulary."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    key_heads: int
    hidden: int
    rotary_base: float
    epsilon: float

    @property
    def head_width(self) -> int:
        return self.width // self.heads


def init(config: Config, seed: int = 0, dtype: torch.dtype = torch.float32) -> Params:
    """Random global parameters."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        drawn = torch.randn(*shape, generator=generator, dtype=torch.float64)
        scaled: Tensor = drawn / shape[0] ** 0.5
        return scaled.to(dtype)

    d, f, k = config.width, config.hidden, config.head_width
    g, r = config.key_heads, config.heads // config.key_heads
    return {
        "embedding": normal(config.vocabulary, d),
        "layers": [
            {
                "attention_norm": normal(d) + 1,
                "qkv": normal(d, g, r + 2, k),
                "out": normal(g, r, k, d) / (r * k) ** 0.5,
                "mlp_norm": normal(d) + 1,
                "gate_up": normal(d, f, 2),
                "down": normal(f, d),
            }
            for _ in range(config.layers)
        ],
        "final_norm": normal(d) + 1,
    }


def specs(config: Config) -> Params:
    """Returns how the parameters are sharded: key heads and theirs, hidden width, vocabulary."""
    layer = {
        "attention_norm": P(),
        "qkv": P(None, "tp"),
        "out": P("tp"),
        "mlp_norm": P(),
        "gate_up": P(None, "tp"),
        "down": P("tp"),
    }
    return {"embedding": P("tp"), "layers": [layer] * config.layers, "final_norm": P()}


def check_ranks(config: Config, num_ranks: int) -> None:
    """Says in one line a size what `device_put` says of each leaf.

    Raises:
        SpecError: something does not divide over the ranks.
    """
    sizes = {
        "key heads": config.key_heads,
        "hidden width": config.hidden,
        "vocabulary": config.vocabulary,
    }
    wrong = [
        f"{name}: {size} = {size // num_ranks}*{num_ranks} + {size % num_ranks}"
        for name, size in sizes.items()
        if size % num_ranks
    ]
    if wrong:
        common = gcd(*sizes.values())
        good = [n for n in range(1, common + 1) if common % n == 0]
        head = f"{num_ranks} ranks of 'tp' cannot share this model evenly; use one of {good}:"
        raise SpecError(listing(head, wrong))


CACHE = P(None, None, "tp")


def empty_cache(config: Config, size: int, length: int, dtype: torch.dtype) -> Cache:
    """Room for `length` positions of `size` sequences, on all ranks together."""
    shape = size, length, config.key_heads, 2, config.head_width
    return [torch.zeros(shape, dtype=dtype) for _ in range(config.layers)]


def apply(
    params: Params, tokens: Tensor, cache: Cache, position: Tensor, config: Config
) -> tuple[Tensor, Cache]:
    """Logits [b, v] after the last of `tokens` [b, t], which stand at `position` and after it."""
    at = positions(tokens.shape[1], offset=position)
    seen = torch.arange(cache[0].shape[1]) <= at.unsqueeze(1)  # [t, s]
    updated: Cache = []

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Attends to what this layer has cached, and caches the new keys and values."""
        cached = cache[len(updated)]
        updated.append(kv_update(cached, torch.stack([k, v], 3), position, dim=1))
        return attention(q, *updated[-1].unbind(3), mask=seen)

    x = _hidden(params, tokens, at, attend, config)[:, -1]
    logits = column_linear(x, params["embedding"].mT, "tp")  # [b, v/tp], of the same table
    return all_gather(logits, "tp", dim=1, dst=I), updated


def loss(params: Params, batch: Tensor, config: Config) -> Tensor:
    """Batch [b/dp, t+1] -> mean nats a token over the batch of all ranks, equal on all of them.

    Gradients of parameters are each rank's addend over "dp". Full logits never exist.
    """
    tokens, targets = batch[:, :-1], batch[:, 1:]
    attend = partial(attention, causal=True)
    x = _hidden(params, tokens, positions(tokens.shape[1]), attend, config)
    table = params["embedding"].mT
    return vocab_parallel_linear_cross_entropy(
        x, table, targets, "tp", batch_axis="dp", ignore_index=None
    )


def _hidden(params: Params, tokens: Tensor, at: Tensor, attend: Attend, config: Config) -> Tensor:
    """Tokens [b, t] at positions [t] -> [b, t, d], ready to be unembedded."""
    x = vocab_parallel_embedding(tokens, params["embedding"], "tp")  # [b, t, d]
    tables = rotary_tables(at, config.head_width, base=config.rotary_base, dtype=x.dtype)
    for layer in params["layers"]:
        h = rms_norm(x, layer["attention_norm"], eps=config.epsilon)
        qkv = column_linear(h, layer["qkv"], "tp")  # [b, t, g/tp, r + 2, k]
        turned = rotary(qkv[..., :-1, :].flatten(2, 3), tables, interleaved=True)
        turned = turned.unflatten(2, (-1, qkv.shape[3] - 1))  # of q and k, [b, t, g/tp, r + 1, k]
        q, k = turned[..., :-1, :].flatten(2, 3), turned[..., -1, :]
        y = attend(q, k, qkv[..., -1, :]).unflatten(2, (-1, layer["out"].shape[1]))
        x = x + row_linear(y, layer["out"], "tp", overlap="off")
        h = rms_norm(x, layer["mlp_norm"], eps=config.epsilon)
        gate, up = column_linear(h, layer["gate_up"], "tp").unbind(-1)  # [b, t, f/tp]
        x = x + row_linear(functional.silu(gate) * up, layer["down"], "tp", overlap="off")
    return rms_norm(x, params["final_norm"], eps=config.epsilon)

"""A GPT per rank in Megatron's style: tensor, sequence and data parallel.

It is written as for torchrun: groups, ranks and sizes of `torch.distributed`, early returns for one
rank, and no line about shardmap_torch. Activations are [sequence, batch, width].
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from examples.megatron_style.cross_entropy import VocabularyParallelCrossEntropy
from examples.megatron_style.mappings import (
    CopyToRegion,
    GatherFirst,
    ReduceFromRegion,
    ReduceScatterFirst,
    ScatterFirst,
    apply,
)

Params = Mapping[str, Tensor]


@dataclass(frozen=True)
class Config:
    """Sizes of a model.

    Attributes:
        vocabulary: number of words.
        width: of the residual stream.
        heads: of attention.
        layers: number of blocks.
        length: of a sequence.
        sequence_parallel: whether the sequence is sharded between the parallel regions.
    """

    vocabulary: int
    width: int
    heads: int
    layers: int
    length: int
    sequence_parallel: bool = False


class GPT:
    """The model of one rank."""

    def __init__(self, config: Config, tp_group: Any, dp_group: Any) -> None:
        """Takes the groups of tensor and of data parallel ranks."""
        self.config, self.tp_group, self.dp_group = config, tp_group, dp_group

    def loss(self, params: Params, tokens: Tensor, targets: Tensor) -> Any:
        """Returns the mean loss over all ranks; tokens are [sequence, batch]."""
        h = self.embed(params, tokens)
        for layer in range(self.config.layers):
            h = h + self.attention(params, layer, self.norm(params, f"{layer}.norm1", h))
            h = h + self.mlp(params, layer, self.norm(params, f"{layer}.norm2", h))
        logits = functional.linear(self.enter(self.norm(params, "norm", h)), params["words"])
        losses = apply(VocabularyParallelCrossEntropy, logits, targets, self.tp_group)
        return apply(ReduceFromRegion, losses.mean(), self.dp_group) / dist.get_world_size(
            self.dp_group
        )

    def enter(self, h: Tensor) -> Any:
        """Enters a parallel region, in which each rank has the whole sequence."""
        if self.config.sequence_parallel:
            return apply(GatherFirst, h, self.tp_group)
        return apply(CopyToRegion, h, self.tp_group)

    def leave(self, h: Tensor) -> Any:
        """Leaves a parallel region, by a sum over its ranks."""
        if self.config.sequence_parallel:
            return apply(ReduceScatterFirst, h, self.tp_group)
        return apply(ReduceFromRegion, h, self.tp_group)

    def embed(self, params: Params, tokens: Tensor) -> Any:
        """Looks words up, of which each rank has some, and adds positions."""
        words, positions = params["words"], params["positions"].unsqueeze(1)
        if dist.get_world_size(self.tp_group) > 1:
            start = dist.get_rank(self.tp_group) * words.shape[0]
            end = start + words.shape[0]
            outside = (tokens < start) | (tokens >= end)
            found = functional.embedding((tokens - start).masked_fill(outside, 0), words)
            found = found.masked_fill(outside.unsqueeze(-1), 0.0)
        else:
            found = functional.embedding(tokens, words)
        h = self.leave(found)
        if self.config.sequence_parallel:
            positions = apply(ScatterFirst, positions, self.tp_group)
        return h + positions

    def norm(self, params: Params, name: str, h: Tensor) -> Tensor:
        """Normalizes each token."""
        weight, bias = params[f"{name}.weight"], params[f"{name}.bias"]
        return functional.layer_norm(h, h.shape[-1:], weight, bias)

    def attention(self, params: Params, layer: int, h: Tensor) -> Any:
        """Attends to earlier tokens; each rank has some of the heads."""
        size = dist.get_world_size(self.tp_group)
        heads, width = self.config.heads // size, self.config.width // self.config.heads
        qkv = functional.linear(
            self.enter(h), params[f"{layer}.qkv.weight"], params[f"{layer}.qkv.bias"]
        )
        length, batch = qkv.shape[:2]
        q, k, v = qkv.view(length, batch, heads, 3, width).permute(3, 1, 2, 0, 4).unbind(0)
        scores = q @ k.transpose(-1, -2) * width**-0.5
        later = torch.ones(length, length, dtype=torch.bool, device=h.device).triu(1)
        mixed = scores.masked_fill(later, float("-inf")).softmax(-1) @ v
        mixed = mixed.permute(2, 0, 1, 3).reshape(length, batch, heads * width)
        out = self.leave(functional.linear(mixed, params[f"{layer}.proj.weight"]))
        return out + params[f"{layer}.proj.bias"]

    def mlp(self, params: Params, layer: int, h: Tensor) -> Any:
        """Applies two layers, the first sharded by columns and the second by rows."""
        up = functional.linear(
            self.enter(h), params[f"{layer}.up.weight"], params[f"{layer}.up.bias"]
        )
        out = self.leave(functional.linear(functional.gelu(up), params[f"{layer}.down.weight"]))
        return out + params[f"{layer}.down.bias"]

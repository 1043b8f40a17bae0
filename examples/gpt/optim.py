"""AdamW on pytrees, and clipping by the global norm of sharded gradients; plain local tensors."""

import math
from dataclasses import dataclass
from typing import Any, TypeAlias

import optree
import torch
from torch import Tensor

from examples.gpt.model import Params
from shardmap_torch import I, P, all_reduce

State: TypeAlias = Any
"""A pytree: the step, and two moments shaped like the parameters."""


@dataclass(frozen=True)
class AdamW:
    """AdamW (Loshchilov and Hutter 2019) with linear warm-up and cosine decay."""

    steps: int
    rate: float = 4e-3
    warmup: int = 20
    betas: tuple[float, float] = (0.9, 0.98)
    decay: float = 0.1
    max_norm: float = 1.0

    def init(self, params: Params) -> State:
        """Moments that are zero."""
        return {
            "step": torch.zeros((), dtype=torch.int64),
            "mean": optree.tree_map(torch.zeros_like, params),
            "square": optree.tree_map(torch.zeros_like, params),
        }

    def specs(self, params: Params) -> State:
        """Moments are cut as their parameters are; `params` are the specs of these."""
        return {"step": P(), "mean": params, "square": params}

    def update(self, params: Params, grads: Params, state: State) -> tuple[Params, State]:
        """One step, the same on one device and on local shards: nothing is communicated."""
        step = state["step"] + 1
        rate, (beta1, beta2) = self._rate(step), self.betas
        mean = optree.tree_map(lambda m, g: m.lerp(g, 1 - beta1), state["mean"], grads)
        square = optree.tree_map(lambda s, g: s.lerp(g.square(), 1 - beta2), state["square"], grads)

        def move(p: Tensor, m: Tensor, s: Tensor) -> Tensor:
            change = m / (1 - beta1**step) / ((s / (1 - beta2**step)).sqrt() + 1e-8)
            decay = self.decay if p.ndim > 1 else 0.0  # matrices only, not the scales of norms
            moved: Tensor = p - (rate * (change + decay * p)).to(p.dtype)
            return moved

        params = optree.tree_map(move, params, mean, square)
        return params, {"step": step, "mean": mean, "square": square}

    def _rate(self, step: Tensor) -> Tensor:
        done: Tensor = (step / self.steps).clamp(max=1)
        decayed = 0.55 + 0.45 * (math.pi * done).cos()  # from 1 to a tenth
        return self.rate * decayed * (step / self.warmup).clamp(max=1)


def clip(grads: Params, specs: Params, max_norm: float) -> tuple[Params, Tensor]:
    """Scales gradients so that their global norm is at most `max_norm`; returns the norm before."""
    norm = global_norm(grads, specs)
    scale = (max_norm / norm).clamp(max=1)
    return optree.tree_map(lambda g: g * scale.to(g.dtype), grads), norm


def global_norm(grads: Params, specs: Params) -> Tensor:
    """The norm over all elements of all leaves, each counted once, equal on all ranks.

    The squares of a leaf's pieces are summed over the axes that cut it, and over no other: there
    every rank holds the same piece.
    """
    squares: dict[tuple[str, ...], Tensor] = {}
    leaves = zip(optree.tree_leaves(grads), optree.tree_leaves(specs), strict=True)
    for grad, spec in leaves:
        squares[spec.mentioned] = squares.get(spec.mentioned, 0) + grad.square().sum()
    sums = [all_reduce(x, axes, dst=I) if axes else x for axes, x in squares.items()]
    return torch.stack(sums).sum().sqrt()

"""Sizes that are measured, and the contestants' common form."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from examples.gpt import model
from examples.gpt.optim import MAX_NORM, PEAK

Step = Callable[[], Tensor]
"""One step of training on the same batch; it keeps its parameters, and returns the loss."""


@dataclass(frozen=True)
class Setting:
    """A size of the model; `examples/gpt` defines what it computes."""

    width: int
    layers: int = 4
    heads: int = 8
    length: int = 64
    sequences: int = 4

    @property
    def config(self) -> model.Config:
        """Returns the example's configuration; no overlapped kernels."""
        return model.Config(
            length=self.length,
            width=self.width,
            heads=self.heads,
            hidden=3 * self.width,
            layers=self.layers,
        )

    def params(self) -> model.Params:
        """Global parameters, equal on all ranks."""
        return model.init(self.config)

    def batch(self) -> Tensor:
        """Global token ids [b, t+1], equal on all ranks."""
        generator = torch.Generator().manual_seed(1)
        shape = (self.sequences, self.length + 1)
        return torch.randint(self.config.vocabulary, shape, generator=generator)


STEPS, WARMUP, BETAS, DECAY = 1_000_000, 20, (0.9, 0.98), 0.1
"""AdamW as `examples.gpt.optim` makes it, for those who write it themselves."""


def rate(step: int) -> float:
    """The learning rate of a step, the first of which is 1."""
    decayed = 0.55 + 0.45 * math.cos(math.pi * min(step / STEPS, 1))
    return PEAK * decayed * min(step / WARMUP, 1)


__all__ = ["BETAS", "DECAY", "MAX_NORM", "PEAK", "STEPS", "WARMUP", "Setting", "Step", "rate"]

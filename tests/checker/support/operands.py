"""Random operands of a kernel that does not take any numbers."""

from collections.abc import Callable, Mapping
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.run.trials.draws import random_like


def _in_another_order(like: Tensor, generator: torch.Generator) -> Tensor:
    return like[torch.randperm(len(like), generator=generator)]


def _bits(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 2, like.shape, generator=generator).to(like.dtype)


def _probabilities(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.rand(like.shape, dtype=like.dtype, generator=generator)


def _singular_at_times(like: Tensor, generator: torch.Generator) -> Tensor:
    return random_like(like, generator) * (torch.rand((), generator=generator) > 0.25)


SPECIAL: Final[Mapping[str, Callable[[Tensor, torch.Generator], Tensor]]] = {
    # Kernels write past their end where lengths add up to more than there is.
    "lengths": _in_another_order,
    "sizes": _in_another_order,
    "is_target": _bits,
    "found_inf": _bits,
    "p": _probabilities,
    "A": _singular_at_times,
}
"""Operands by the name of the argument."""


def drawn(name: str, like: Tensor, generator: torch.Generator) -> Tensor:
    """Another value of an argument."""
    return SPECIAL.get(name, random_like)(like, generator)

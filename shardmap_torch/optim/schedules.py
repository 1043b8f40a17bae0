"""Learning-rate schedules: functions of the number of the step."""

import math
from collections.abc import Callable
from typing import TypeAlias

from torch import Tensor

from shardmap_torch.errors import OptimizerError, listing, show
from shardmap_torch.optim.lists import is_number

Schedule: TypeAlias = Callable[[Tensor], Tensor]
"""Maps the number of the step, a float64 scalar that starts at 1, to the learning rate."""

Rate: TypeAlias = float | Schedule


def rate_at(rate: Rate, step: Tensor) -> Tensor | float:
    """Returns the learning rate of one step."""
    return rate(step) if callable(rate) else rate


def warmup_cosine(peak: float, *, steps: int, warmup: int = 0, final: float = 0.0) -> Schedule:
    """Rises linearly to `peak` over `warmup` steps, and falls as a cosine to `final` at `steps`.

    Args:
        peak: the largest learning rate.
        steps: the step at which `final` is reached, and kept from then on.
        warmup: number of steps of the linear rise, which multiplies the cosine.
        final: the last learning rate.

    Source: Loshchilov and Hutter 2017 (SGDR), `optax.warmup_cosine_decay_schedule`.

    Example:
        >>> import torch
        >>> rate = warmup_cosine(1.0, steps=10, final=0.1)
        >>> [round(rate(torch.tensor(float(step))).item(), 3) for step in (0, 5, 10, 20)]
        [1.0, 0.55, 0.1, 0.1]
    """
    numbers = {"peak": peak, "steps": steps, "warmup": warmup, "final": final}
    wrong = [
        f"{word}={show(value)} is no number"
        for word, value in numbers.items()
        if not is_number(value)
    ]
    if wrong:
        raise OptimizerError(listing("warmup_cosine:", wrong))
    middle, amplitude = (peak + final) / 2, (peak - final) / 2

    def rate(step: Tensor) -> Tensor:
        done = (step / steps).clamp(max=1)
        decayed = middle + amplitude * (math.pi * done).cos()
        return decayed * (step / warmup).clamp(max=1) if warmup else decayed

    return rate

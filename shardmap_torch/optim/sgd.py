"""Stochastic gradient descent on lists of tensors."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from shardmap_torch.core.tree import put
from shardmap_torch.errors import OptimizerError
from shardmap_torch.optim.lists import Tensors, foreach
from shardmap_torch.optim.optimizer import Decays, Elementwise, Optimizer, Rate, Step, check_range


def sgd(
    lr: Rate = 1e-3,
    *,
    momentum: float = 0.0,
    dampening: float = 0.0,
    nesterov: bool = False,
    weight_decay: float = 0.0,
    decays: Decays = True,
    state_dtype: torch.dtype | None = None,
) -> Optimizer:
    """Makes the optimizer of stochastic gradient descent, with momentum or without.

    Its `update` equals `torch.optim.SGD`, entry by entry, on any shards. State: the step and, with
    momentum, `momentum_buffer`, as large as the parameters and sharded as they are; nothing is
    communicated.

    Args:
        lr: the learning rate, or a function of the step such as `warmup_cosine(...)`.
        momentum: momentum factor of the buffer.
        dampening: share of the gradient left out of the buffer, from the second step on.
        nesterov: whether to use Nesterov momentum; needs momentum, and no dampening.
        weight_decay: coefficient of the parameter that is added to its gradient.
        decays: which parameters decay; see `adamw`.
        state_dtype: the dtype of the buffer and of the arithmetic; by default each parameter's.

    Raises:
        OptimizerError: an argument is out of range.

    Source: `torch.optim.SGD`, `optax.sgd`; Sutskever et al. 2013.

    Example:
        >>> from shardmap_torch.optim import sgd
        >>> optimizer, params = sgd(0.5), {"w": torch.ones(2)}
        >>> optimizer.update(params, {"w": torch.ones(2)}, optimizer.init(params))[0]
        {'w': tensor([0.5000, 0.5000])}
    """
    check_range(
        "sgd",
        lr=(0.0 if callable(lr) else lr, 0.0, float("inf")),
        momentum=(momentum, 0.0, float("inf")),
        weight_decay=(weight_decay, 0.0, float("inf")),
    )
    if nesterov and (not momentum or dampening):
        raise OptimizerError("sgd: nesterov=True needs momentum > 0 and dampening=0.")
    return _SGD(lr, weight_decay, decays, state_dtype, momentum, dampening, nesterov)


@dataclass(frozen=True, repr=False)
class _SGD(Elementwise):
    momentum: float
    dampening: float
    nesterov: bool

    moments: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    @property
    def moment_names(self) -> tuple[str, ...]:
        return self.moments if self.momentum else ()

    def step(
        self, params: Tensors, grads: Tensors, moments: list[Tensors], at: Step
    ) -> tuple[Tensors, list[Tensors]]:
        grads = self._with_decay(params, grads, at)
        change = grads
        if moments:
            buffer = foreach("mul", moments[0], self.momentum)
            moments = [foreach("add", buffer, self._dampened(grads, at))]
            change = moments[0]
            if self.nesterov:
                change = foreach("add", grads, foreach("mul", moments[0], self.momentum))
        if isinstance(at.lr, Tensor):
            return foreach("sub", params, foreach("mul", change, at.lr)), moments
        return foreach("sub", params, change, alpha=float(at.lr)), moments

    def _dampened(self, grads: Tensors, at: Step) -> Tensors:
        """Scales gradients by 1 - dampening, except in the first step, like torch's SGD."""
        if not self.dampening:
            return grads
        return foreach("mul", grads, torch.where(at.number == 1, 1.0, 1 - self.dampening))

    def _with_decay(self, params: Tensors, grads: Tensors, at: Step) -> Tensors:
        places = [place for place, amount in enumerate(at.decays) if amount]
        if not places:
            return grads
        own = [grads[i] for i in places], [params[i] for i in places]
        return put(grads, places, foreach("add", *own, alpha=self.weight_decay))

"""The step by hand, compiled by inductor without a graph break."""

import math

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.train_step import handwritten
from benchmarks.train_step.setting import BETAS, DECAY, MAX_NORM, Setting, Step, rate

Tensors = list[Tensor]


def _update(
    state: tuple[Tensors, Tensors, Tensors], grads: Tensors, num_sharded: int, numbers: Tensors
) -> None:
    """Sums, clips and steps, in place; what changes from step to step is a tensor.

    A number would be compiled again.
    """
    params, means, squares = state
    scale, decay, amount = numbers
    sharded = grads[:num_sharded]
    flat = torch.cat([g.flatten() for g in grads[num_sharded:]])
    dist.all_reduce(flat)
    square = torch.stack(torch._foreach_norm(sharded)).square().sum()
    dist.all_reduce(square)
    norm = (square + flat.square().sum()).sqrt()
    scales = params[num_sharded:]
    parts = flat.split([p.numel() for p in scales])
    grads = [*sharded, *(g.view_as(p) for g, p in zip(parts, scales, strict=True))]
    grads = list(torch._foreach_mul(grads, (MAX_NORM / norm).clamp(max=1)))
    beta1, beta2 = BETAS
    torch._foreach_lerp_(means, grads, 1 - beta1)
    torch._foreach_mul_(squares, beta2)
    torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
    divisors = torch._foreach_mul(torch._foreach_sqrt(squares), scale)
    torch._foreach_add_(divisors, 1e-8)
    torch._foreach_mul_(params[:num_sharded], decay)
    torch._foreach_add_(params, torch._foreach_mul(torch._foreach_div(means, divisors), amount))


class _Compiled(handwritten.Training):
    """A graph of the loss, one of its backward, and one of the update."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self.loss = torch.compile(handwritten.loss, fullgraph=True, dynamic=False)
        self.update = torch.compile(_update, fullgraph=True, dynamic=False)

    def step(self) -> Tensor:
        loss = self.loss(self.params, self.batch)
        grads = list(torch.autograd.grad(loss, self.all))
        self.steps += 1
        now, (beta1, beta2) = rate(self.steps), BETAS
        numbers = (
            1 / math.sqrt(1 - beta2**self.steps),
            1 - now * DECAY,
            -now / (1 - beta1**self.steps),
        )
        with torch.no_grad():
            state = self.all, self.means, self.squares
            self.update(state, grads, len(self.matrices), [torch.tensor(x) for x in numbers])
        return loss.detach()


def by_hand(setting: Setting) -> Step:
    """Makes the step by hand of compiled parts."""
    return _Compiled(setting).step

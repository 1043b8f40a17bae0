"""The cross entropy of logits that are sharded over the vocabulary, as in Shoeybi et al. 2019."""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class VocabularyParallelCrossEntropy(Function):
    """log(sum(exp(logits))) - logits[target], of which each rank has a part of the vocabulary."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, group: Any) -> Tensor:
        """Sends three numbers a token: the maximum, the target's logit, the sum."""
        largest = logits.max(dim=-1)[0]
        dist.all_reduce(largest, op=dist.ReduceOp.MAX, group=group)
        logits = logits - largest.unsqueeze(-1)
        count = logits.shape[-1]
        start = dist.get_rank(group) * count
        end = start + count
        outside = (target < start) | (target >= end)
        own = (target - start).masked_fill(outside, 0)
        chosen = logits.gather(-1, own.unsqueeze(-1)).squeeze(-1).masked_fill(outside, 0.0)
        dist.all_reduce(chosen, group=group)
        exp = logits.exp()
        normalizer = exp.sum(dim=-1)
        dist.all_reduce(normalizer, group=group)
        ctx.save_for_backward(exp / normalizer.unsqueeze(-1), outside, own)
        return normalizer.log() - chosen

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Returns softmax - one-hot of the own part, without a message."""
        softmax, outside, own = ctx.saved_tensors
        made = softmax.clone().flatten(0, -2)
        rows = torch.arange(made.shape[0], device=made.device)
        made[rows, own.flatten()] -= 1.0 - outside.flatten().to(made.dtype)
        return made.view_as(softmax) * grads[0].unsqueeze(-1), None, None

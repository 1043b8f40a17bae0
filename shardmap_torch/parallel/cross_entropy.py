"""CrossEntropy: the per-rank body of `loss_parallel`, for logits sharded over their classes."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from shardmap_torch.nn.loss import own_scores, vocab_parallel_cross_entropy
from shardmap_torch.ops import all_reduce
from shardmap_torch.spec import Entry, P
from shardmap_torch.types import I, R

Reduction = Literal["none", "sum", "mean"]
REDUCTIONS: Final = ("none", "sum", "mean")


@dataclass(frozen=True)
class CrossEntropy:
    """`torch.nn.functional.cross_entropy` on one rank, with its arguments.

    Attributes:
        axis: the mesh axis over which classes are sharded.
        batch: for each other dim of the logits, the axes over which it is sharded.
        class_dim: the dim of the classes.
        num_classes: on all ranks together.
        reduction: of the losses of all positions, on all ranks.
        ignore_index: positions with this target do not count.
        label_smoothing: this part of each target is spread evenly over all classes.
        dtype: of the result.
    """

    axis: str | tuple[str, ...]
    batch: tuple[Entry, ...]
    class_dim: int
    num_classes: int
    reduction: Reduction
    ignore_index: int
    label_smoothing: float
    dtype: torch.dtype

    def __call__(
        self, logits: Tensor, target: Tensor, weight: Tensor | None, own_weight: Tensor | None
    ) -> Tensor:
        """Computes the loss; `weight` has all classes, `own_weight` those of this rank."""
        logits = logits.movedim(self.class_dim, -1)
        if weight is None or own_weight is None:
            loss = vocab_parallel_cross_entropy(
                logits,
                target,
                self.axis,
                reduction=self.reduction,
                batch_axis=self._batch_axes,
                ignore_index=self.ignore_index,
                label_smoothing=self.label_smoothing,
            )
        else:
            loss = self._weighted(logits, target, weight, own_weight)
        return loss.to(self.dtype)

    def _weighted(
        self, logits: Tensor, target: Tensor, weight: Tensor, own_weight: Tensor
    ) -> Tensor:
        """Computes the loss with class weights, which scale targets and label smoothing."""
        x = logits.to(torch.promote_types(logits.dtype, torch.float32))
        x = x - all_reduce(x.detach().amax(-1), self.axis, op="max", dst=R).unsqueeze(-1)
        log_total = all_reduce(x.exp().sum(-1), self.axis, dst=I).log()
        kept = target != self.ignore_index
        ids = target.where(kept, 0)
        counted = weight[ids] * kept
        sharp, smooth = 1 - self.label_smoothing, self.label_smoothing / self.num_classes
        score: Tensor = own_scores(self.axis)(x, ids) * (counted * sharp)
        mass = counted * sharp
        if smooth:
            score = score + (x * own_weight).sum(-1) * smooth
            mass = mass + weight.sum() * smooth
        nats = log_total * mass - all_reduce(score, self.axis, dst=I)
        nats = nats.where(kept, 0)
        if self.reduction == "none":
            return nats
        total: Tensor = self._add_up(nats)
        if self.reduction == "mean":
            total = total / self._add_up(counted)
        return total

    def _add_up(self, x: Tensor) -> Tensor:
        """Sums over the positions of all ranks."""
        axes = self._batch_axes
        total: Tensor = x.sum()
        return all_reduce(total, axes, dst=I) if axes else total

    @property
    def _batch_axes(self) -> tuple[str, ...]:
        return tuple(axis for _, axes in P(*self.batch).sharded_dims for axis in axes)

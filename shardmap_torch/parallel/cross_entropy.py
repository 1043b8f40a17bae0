"""Cross-entropy of logits whose class dim is sharded, which are never gathered."""

from dataclasses import dataclass
from typing import Final, Literal

import torch
from torch import Tensor

from shardmap_torch.checker.region import local_region
from shardmap_torch.ops import all_reduce, axis_index
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

    axis: str
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
        x = logits.movedim(self.class_dim, -1)
        x = x.to(torch.promote_types(x.dtype, torch.float32))
        x = x - all_reduce(x.detach().amax(-1), self.axis, op="max", dst=R).unsqueeze(-1)
        log_total = all_reduce(x.exp().sum(-1), self.axis, dst=I).log()
        kept = target != self.ignore_index
        ids = target.where(kept, 0)
        sharp, smooth = 1 - self.label_smoothing, self.label_smoothing / self.num_classes
        score = self._own_score(x, ids)
        if weight is None or own_weight is None:
            score, mass = score * sharp, None
            score = score + x.sum(-1) * smooth if smooth else score
        else:
            of_target = weight[ids]
            score, mass = score * (of_target * sharp), of_target * sharp
            if smooth:
                score = score + (x * own_weight).sum(-1) * smooth
                mass = mass + weight.sum() * smooth
        nats = (log_total if mass is None else log_total * mass) - all_reduce(
            score, self.axis, dst=I
        )
        counted = kept if weight is None else weight[ids] * kept
        return self._reduce(nats.where(kept, 0), counted).to(self.dtype)

    def _own_score(self, x: Tensor, ids: Tensor) -> Tensor:
        """The logits of the targets, zero where another rank has them; NaN where nobody has."""
        axis, num_classes = self.axis, self.num_classes

        @local_region(
            in_types=(P(*self.batch, axis), P(*self.batch)),
            out_types=P(*self.batch, partial={axis}),
        )
        def scores_of_own_targets(x: Tensor, ids: Tensor) -> Tensor:
            local = ids - axis_index(axis) * x.shape[-1]
            owned = (local >= 0) & (local < x.shape[-1])
            exists = (ids >= 0) & (ids < num_classes)
            found = x.gather(-1, local.where(owned, 0).unsqueeze(-1)).squeeze(-1)
            return found * owned.to(x.dtype).masked_fill(~exists, torch.nan)

        return scores_of_own_targets(x, ids)

    def _reduce(self, nats: Tensor, counted: Tensor) -> Tensor:
        """Sums or averages over the positions of all ranks."""
        if self.reduction == "none":
            return nats
        axes = tuple(axis for entry in self.batch for axis in _axes(entry))
        total = nats.sum()
        total = all_reduce(total, axes, dst=I) if axes else total
        if self.reduction == "sum":
            return total
        count = counted.sum()
        return total / (all_reduce(count, axes, dst=I) if axes else count)


def _axes(entry: Entry) -> tuple[str, ...]:
    if entry is None:
        return ()
    return (entry,) if isinstance(entry, str) else entry

"""Losses that average over entries, and may leave entries out."""

from collections.abc import Mapping
from typing import Any, Final

from torch.nn import functional

from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.sharded import Step

_AVERAGES: Final = overloads(
    "mean mean.dim mse_loss huber_loss smooth_l1_loss soft_margin_loss binary_cross_entropy"
    " binary_cross_entropy_with_logits"
)
"""Averages over all entries. Shards of other averages, which ignore some, may differ in weight."""

IGNORING: Final = overloads("nll_loss_forward nll_loss2d_forward")
"""Losses that leave out entries whose target is `ignore_index`."""

READING_TARGETS: Final[Mapping[Any, int]] = {
    functional.cross_entropy: 1,
    functional.nll_loss: 1,
    functional.linear_cross_entropy: 2,
}
"""Functions whose targets, at this position, each run reads: averages have equal weights then."""


def is_average(step: Step) -> bool:
    """Returns whether the mean of an operation over shards of one size is that over all of them."""
    return step.op in _AVERAGES or (
        step.op in IGNORING
        and step.arguments["weight"] is None
        and step.function in READING_TARGETS
    )

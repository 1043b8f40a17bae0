"""Losses that average over entries, and may leave entries out."""

from typing import Any, Final

import torch
from torch.nn import functional

from shardmap_torch.checker.spmd.sharded import Step

aten = torch.ops.aten

_AVERAGES: Final = frozenset(
    {
        aten.mean.default,
        aten.mean.dim,
        aten.mse_loss.default,
        aten.huber_loss.default,
        aten.smooth_l1_loss.default,
        aten.soft_margin_loss.default,
        aten.binary_cross_entropy.default,
        aten.binary_cross_entropy_with_logits.default,
    }
)
"""Averages over all entries. Shards of other averages, which ignore some, may differ in weight."""

_IGNORING: Final = frozenset({aten.nll_loss_forward.default, aten.nll_loss2d_forward.default})

READING_TARGETS: Final[frozenset[Any]] = frozenset({functional.cross_entropy, functional.nll_loss})
"""Functions whose targets each run reads, so that averages of shards have equal weights."""


def is_average(step: Step) -> bool:
    """Returns whether the mean of an operation over shards of one size is that over all of them."""
    return step.op in _AVERAGES or (
        step.op in _IGNORING
        and step.arguments["weight"] is None
        and step.function in READING_TARGETS
    )


def ignores(step: Step) -> bool:
    """Returns whether an operation leaves entries out whose target is `ignore_index`."""
    return step.op in _IGNORING

"""Losses that a module computes itself, as those of transformers do of `labels=`, on data axes.

Each rank has some rows of the batch; the loss is that of all. A mean over the positions that are
not ignored, of which the ranks have different numbers, is a sum divided by a count, each added up
over the ranks.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Signature, signature
from typing import Any, Final

from torch import Tensor
from torch.nn import functional

from shardmap_torch.core.function_modes import FunctionMode
from shardmap_torch.ops import all_reduce
from shardmap_torch.ops.body import types_of
from shardmap_torch.types import I, V

_AVERAGES: Final = (
    functional.binary_cross_entropy,
    functional.binary_cross_entropy_with_logits,
    functional.cosine_embedding_loss,
    functional.gaussian_nll_loss,
    functional.hinge_embedding_loss,
    functional.huber_loss,
    functional.kl_div,
    functional.l1_loss,
    functional.margin_ranking_loss,
    functional.mse_loss,
    functional.multi_margin_loss,
    functional.multilabel_margin_loss,
    functional.multilabel_soft_margin_loss,
    functional.poisson_nll_loss,
    functional.smooth_l1_loss,
    functional.soft_margin_loss,
    functional.triplet_margin_loss,
    functional.triplet_margin_with_distance_loss,
)
"""Losses whose mean is over all entries, or all rows."""

_WEIGHTED: Final = (functional.l1_loss, functional.mse_loss)
"""Those of them that divide by the sum of the weights, where there are any."""

_IGNORING: Final = (functional.cross_entropy, functional.nll_loss)
"""Losses whose mean is over the entries that are not ignored."""

_LOSSES: Final[Mapping[Callable[..., Any], Signature]] = {
    loss: signature(loss) for loss in (*_AVERAGES, *_IGNORING)
}


class BatchLosses(FunctionMode):
    """Makes sums and means of losses of each rank's rows those of the batch."""

    def __init__(self, axes: Sequence[str]) -> None:
        """Takes the axes over which ranks have other rows."""
        super().__init__()
        self._axes = axes

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function; a loss of rows, and then sums over the ranks."""
        if func not in _LOSSES:
            return func(*args, **kwargs)
        bound = _LOSSES[func].bind(*args, **kwargs)
        bound.apply_defaults()
        options = bound.arguments
        operands = [each for each in options.values() if isinstance(each, Tensor)]
        axes = tuple(axis for axis in self._axes if any(_differs(x, axis) for x in operands))
        is_legacy = any(options.get(name) is not None for name in ("size_average", "reduce"))
        if not axes or is_legacy or options["reduction"] not in ("sum", "mean", "batchmean"):
            return func(*args, **kwargs)
        if options["reduction"] == "sum":
            return all_reduce(func(**options), axes, dst=I)
        count = _count(func, options)
        if count is None:
            return all_reduce(func(**options), axes, dst=I, op="mean")
        total = func(**{**options, "reduction": "sum"})
        return all_reduce(total, axes, dst=I) / all_reduce(count, axes, dst=I)


def _differs(x: Tensor, axis: str) -> bool:
    return V in (types_of(x, (axis,)) or ())


def _count(func: Callable[..., Any], options: Mapping[str, Any]) -> Tensor | None:
    """Returns what a mean divides by; None for a number of entries, which is equal on all ranks."""
    weight = options.get("weight")
    if func in _WEIGHTED and weight is not None:
        divisor: Tensor = weight.sum()
        return divisor
    if func in _AVERAGES or (target := options["target"]).is_floating_point():
        return None
    counted: Tensor = target != options["ignore_index"]
    return (counted if weight is None else weight[target.where(counted, 0)] * counted).sum()

"""Losses that a module computes itself, as those of transformers do of `labels=`, on data axes.

Each rank has some rows of the batch; the loss is that of all. A mean over the positions that are
not ignored, of which the ranks have different numbers, is a sum divided by a count, each added up
over the ranks.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from shardmap_torch.core.function_modes import FunctionMode
from shardmap_torch.core.losses import count_of, options_of
from shardmap_torch.ops import all_reduce
from shardmap_torch.ops.body import types_of
from shardmap_torch.types import I, V


class BatchLosses(FunctionMode):
    """Makes sums and means of losses of each rank's rows those of the batch."""

    def __init__(self, axes: Sequence[str]) -> None:
        """Takes the axes over which ranks have other rows."""
        super().__init__()
        self._axes = axes

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function; a loss of rows, and then sums over the ranks."""
        options = options_of(func, args, kwargs)
        if options is None:
            return func(*args, **kwargs)
        operands = [each for each in options.values() if isinstance(each, Tensor)]
        axes = tuple(axis for axis in self._axes if any(_differs(x, axis) for x in operands))
        if not axes or options["reduction"] not in ("sum", "mean", "batchmean"):
            return func(*args, **kwargs)
        if options["reduction"] == "sum":
            return all_reduce(func(**options), axes, dst=I)
        count = count_of(func, options)
        if count is None:
            return all_reduce(func(**options), axes, dst=I, op="mean")
        total = func(**{**options, "reduction": "sum"})
        return all_reduce(total, axes, dst=I) / all_reduce(count, axes, dst=I)


def _differs(x: Tensor, axis: str) -> bool:
    return V in (types_of(x, (axis,)) or ())

"""Losses and batch norms that a module computes itself, of rows that data axes divide.

Each rank has some rows of the batch; the loss is that of all, as of models of transformers that are
given `labels=`, and so are the statistics of a batch norm in training. A mean over the positions
that are not ignored, of which the ranks have different numbers, is a sum divided by a count, each
added up over the ranks.
"""

import inspect
from collections.abc import Sequence
from typing import Any, Final

from torch import Tensor, nn
from torch.nn import functional

from shardmap_torch.core.function_modes import FunctionMode
from shardmap_torch.core.losses import count_of, options_of
from shardmap_torch.nn import batch_norm
from shardmap_torch.ops import all_reduce, convert
from shardmap_torch.ops.body import types_of
from shardmap_torch.types import I, R, V


class WholeBatch(FunctionMode):
    """Makes sums and means of losses of each rank's rows, and batch norms, those of the batch."""

    def __init__(self, axes: Sequence[str]) -> None:
        """Takes the axes over which ranks have other rows."""
        super().__init__()
        self._axes = axes

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function; a loss of rows, and then sums over the ranks."""
        if func is functional.batch_norm:
            return self._batch_norm(**_BATCH_NORM.bind(*args, **kwargs).arguments)
        options = options_of(func, args, kwargs)
        if options is None:
            return func(*args, **kwargs)
        operands = [each for each in options.values() if isinstance(each, Tensor)]
        axes = self._over(operands)
        if not axes or options["reduction"] not in ("sum", "mean", "batchmean"):
            return func(*args, **kwargs)
        if options["reduction"] == "sum":
            return all_reduce(func(**options), axes, dst=I)
        count = count_of(func, options)
        if count is None:
            return all_reduce(func(**options), axes, dst=I, op="mean")
        total = func(**{**options, "reduction": "sum"})
        return all_reduce(total, axes, dst=I) / all_reduce(count, axes, dst=I)

    def _over(self, operands: Sequence[Tensor]) -> tuple[str, ...]:
        """Returns the axes over which some of the operands are rows."""
        return tuple(axis for axis in self._axes if any(_differs(x, axis) for x in operands))

    def _batch_norm(
        self,
        input: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None = None,
        bias: Tensor | None = None,
        training: bool = False,
        momentum: float = 0.1,
        eps: float = 1e-5,
    ) -> Tensor:
        running = running_mean, running_var
        axes = self._over([input]) if training else ()
        if not axes:
            scales = weight, bias
            return functional.batch_norm(input, *running, *scales, training, momentum, eps)
        none = input.new_zeros(input.shape[1:2])
        mean, var = (none if each is None else each for each in running)
        weight, bias = (_replicated(each, axes) for each in (weight, bias))
        rest: Any = {"momentum": momentum, "eps": eps, "weight_type": R}
        y, *new = batch_norm(input, mean, var, weight, bias, axes, **rest)
        for each, value in zip(running, new, strict=True):
            if each is not None:
                each.copy_(value)
        return y


class WholeBatchNorm(nn.SyncBatchNorm):
    """A SyncBatchNorm that leaves the statistics of all rows to `WholeBatch`."""

    forward = nn.BatchNorm2d.forward


_BATCH_NORM: Final = inspect.signature(functional.batch_norm)


def _replicated(x: Tensor | None, axes: Sequence[str]) -> Tensor | None:
    """Converts a parameter over the axes over which it has not been gathered, as by `fsdp=`."""
    if x is None:
        return None
    own = tuple(axis for axis in axes if I in (types_of(x, (axis,)) or ()))
    return convert(x, own, src=I, dst=R) if own else x


def _differs(x: Tensor, axis: str) -> bool:
    return V in (types_of(x, (axis,)) or ())

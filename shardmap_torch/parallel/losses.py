"""Losses and batch norms that a module computes itself, of rows that data axes divide.

Each rank has some rows of the batch; the loss is that of all, as of models of transformers that are
given `labels=`, and so are the statistics of a batch norm in training. A mean over the positions
that are not ignored, of which the ranks have different numbers, is a sum divided by a count, each
added up over the ranks.
"""

import inspect
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import compress
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from shardmap_torch.checker.queries import dims_over
from shardmap_torch.core.functorch import is_smooth
from shardmap_torch.core.losses import count_of, options_of
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.tree import flatten, unflatten
from shardmap_torch.nn import batch_norm
from shardmap_torch.ops import all_reduce, axis_size, convert
from shardmap_torch.ops.body import types_of
from shardmap_torch.parallel.crossing import Known, UnknownError
from shardmap_torch.types import I, K, R, V


class WholeBatch(FunctionMode):
    """Makes sums and means of losses of each rank's rows, and batch norms, those of the batch."""

    def __init__(self, rows: Sequence[str], others: Sequence[str], known: Known) -> None:
        """Takes the axes that divide rows, those that divide other dims, and what is known."""
        super().__init__()
        self._rows, self._axes, self._known, self._has_whole = rows, (*rows, *others), known, False

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Runs a function; a loss or a sum of rows, and then sums over the ranks."""
        frame: Any = sys._getframe(2)
        while frame.f_code.co_name in ("call", "__torch_function__"):  # other modes of this package
            frame = frame.f_back
        if frame.f_globals.get("__name__", "").startswith("shardmap_torch."):
            return func(*args, **kwargs)  # layers and backends sum over ranks by themselves
        is_whole = self._has_whole and any(map(_is_whole, flatten((args, kwargs))[0]))
        if is_whole:
            args, kwargs = self._alike(func, args, kwargs)
        op = _REDUCTIONS.get(func) if self._known.sums_shards else None
        axes = () if op is None else self._reduced(frame, *args, **kwargs)
        made = self._call(func, args, kwargs) if op is None else func(*args, **kwargs)
        if axes:
            made = self._note_whole(all_reduce(made, axes, dst=I, op=op or "sum"))
        return self._note_whole(made) if is_whole else made

    def _note_whole(self, made: Any) -> Any:
        """Notes results as those of the batch, which other operands are cast to meet."""
        for each in flatten(made)[0]:
            if is_smooth(each):
                self._has_whole = each._shardmap_whole = True
        return made

    def _call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func is functional.batch_norm:
            return self._batch_norm(**_BATCH_NORM.bind(*args, **kwargs).arguments)
        options = options_of(func, args, kwargs)
        if options is None:
            return func(*args, **kwargs)
        operands = [each for each in options.values() if isinstance(each, Tensor)]
        axes = self._over(operands)
        if not axes or options["reduction"] not in ("sum", "mean", "batchmean"):
            return func(*args, **kwargs)
        return self._note_whole(_of_batch(func, options, axes))

    def _reduced(
        self, frame: FrameType, input: Tensor, dim: Any = None, *_: Any, **others: Any
    ) -> tuple[str, ...]:
        """Returns the axes that divide the dims of a sum.

        Raises:
            UnknownError: what records the program of one device, and knows no shards, took others.
        """
        given, (found, guess) = others.get("axis", dim), dims_over(input, self._axes)
        dims = range(input.ndim) if given in (None, (), []) else flatten(given)[0]
        within = {each % max(input.ndim, 1) for each in dims}
        own, first = (
            tuple(compress(self._axes, [each.dim in within for each in types]))
            for types in (found, guess)
        )
        if own == first and not self._known.sums:
            return own
        at = f"{frame.f_code.co_filename}:{frame.f_lineno}:{frame.f_lasti}"
        if V in found:
            return self._known.sums.get(at, first)
        if own != first and at not in self._known.sums:
            raise UnknownError(replace(self._known, sums={**self._known.sums, at: own}))
        return own

    def _alike(self, func: Any, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Casts operands where a number of the batch meets rows, or what is computed without them.

        Beside rows each rank uses it in its own way. A penalty of parameters, of which each rank
        has all, is one computation repeated as the loss is to which it is added.
        """
        name = getattr(func, "__name__", "")
        leaves, structure = flatten((args, kwargs))
        operands = [at for at, x in enumerate(leaves) if isinstance(x, Tensor)]
        if len(operands) < 2 or name in _NO_OPERATIONS:
            return args, kwargs
        kept = operands[:1] if name in _WRITES or (name[-1:] == "_" and name[-2:] != "__") else []
        for axis in self._axes:
            types = {at: (types_of(leaves[at], (axis,)) or (K,))[0] for at in operands}
            met = {*types.values()}
            one = I in met and not any(types[at] in (R, K) for at in kept) and V not in met
            # Over rows parameters become R, as ranks use them differently; over others mostly I.
            same = (R, K) if axis in self._rows else (R,)
            src, dst = (same, (R, I)) if one else ((I,), (I, R))
            for at in operands:
                if at not in kept and types[at] in src and is_smooth(leaves[at]):
                    leaves[at] = convert(leaves[at], axis, src=dst[0], dst=dst[1])
        found: tuple[Any, Any] = unflatten(structure, leaves)
        return found

    def _over(self, operands: Sequence[Tensor]) -> tuple[str, ...]:
        """Returns the axes over which some of the operands are rows."""
        return tuple(axis for axis in self._rows if any(_differs(x, axis) for x in operands))

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


_REDUCTIONS: Final[Mapping[Any, Any]] = {
    **{torch.sum: "sum", Tensor.sum: "sum", torch.nansum: "sum", Tensor.nansum: "sum"},
    **{torch.mean: "mean", Tensor.mean: "mean"},
}
"""Sums and means, and how those of the ranks' rows are made one."""

_WRITES: Final = frozenset(("__iadd__", "__isub__", "__imul__", "__itruediv__", "__setitem__"))
"""Functions that write into their first operand, which is not cast."""

_NO_OPERATIONS: Final = frozenset(("grad", "backward", "__set__"))


def _of_batch(func: Any, options: Mapping[str, Any], axes: tuple[str, ...]) -> Any:
    """Returns a loss of the rows of all ranks."""
    if options["reduction"] == "sum":
        return all_reduce(func(**options), axes, dst=I)
    count = count_of(func, options)
    if count is None:
        return all_reduce(func(**options), axes, dst=I, op="mean")
    total = func(**{**options, "reduction": "sum"})
    return all_reduce(total, axes, dst=I) / _summed(count, axes)


def _summed(count: Tensor, axes: tuple[str, ...]) -> Tensor:
    """Sums a count; targets that are constants give each rank the same one."""
    own = tuple(axis for axis in axes if not _differs(count, axis))
    others = tuple(axis for axis in axes if axis not in own)
    count = all_reduce(count, others, dst=I) if others else count
    return count * axis_size(own) if own else count


def _is_whole(x: Any) -> bool:
    return hasattr(x, "_shardmap_whole")


_BATCH_NORM: Final = inspect.signature(functional.batch_norm)


def _replicated(x: Tensor | None, axes: Sequence[str]) -> Tensor | None:
    """Converts a parameter over the axes over which it has not been gathered, as by `fsdp=`."""
    if x is None:
        return None
    own = tuple(axis for axis in axes if I in (types_of(x, (axis,)) or ()))
    return convert(x, own, src=I, dst=R) if own else x


def _differs(x: Tensor, axis: str) -> bool:
    return V in (types_of(x, (axis,)) or ())

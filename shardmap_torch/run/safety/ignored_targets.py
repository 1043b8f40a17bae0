"""Runs in which no target of a cross entropy may be ignored.

The mean over ranks of means over their shards is the mean on one device if all shards have the same
number of entries that count. Under global strictness a mean cross entropy over a sharded dim is
accepted for that reason, and each run looks whether a target is `ignore_index`.
"""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.ops.losses import READING_TARGETS
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.modes import FunctionMode
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError


def counting_all(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the body of `name`, whose averaged cross entropies raise where they leave one out."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _Counting(name):
            return function(*args, **kwargs)

    return counted


class _Counting(FunctionMode):
    """Function mode that looks at the targets of losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        if func in READING_TARGETS:
            at = READING_TARGETS[func]
            target = self._counted(func, *_targets(*args[:1], *args[at:], **kwargs))
            if "target" in kwargs:
                kwargs = {**kwargs, "target": target}
            else:
                args = (*args[:at], target, *args[at + 1 :])
        return func(*args, **kwargs)

    def _counted(self, func: Any, target: Tensor, index: int, reduction: str) -> Tensor:
        """Returns the targets, which are read here; in a graph, where that runs."""
        if reduction != "mean" or target.is_floating_point():
            return target
        if torch.compiler.is_dynamo_compiling():
            found: Tensor = _read(target, index, self._name, func.__name__)
            return found
        with DisableTorchFunction(), torch.no_grad():
            _require_all(base_of(target), index, self._name, func.__name__, f"\n  at {call_site()}")
        return target


def _targets(
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int | None = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    **others: Any,
) -> tuple[Tensor, int, str]:
    """Returns what of a loss's arguments decides whether a target is left out."""
    return target, -100 if ignore_index is None else ignore_index, reduction


def _require_all(target: Tensor, index: int, name: str, loss: str, where: str = "") -> None:
    if bool((target == index).any()):
        raise ShardTypeError(
            f"{name}: check='global': {loss} averages over a sharded dim, and "
            f"a target is ignore_index={index}: shards that leave out different numbers of "
            f"entries have means of different weights.{where}\n"
            "Fix: take reduction='sum', all_reduce it, and divide by the number of entries "
            "that count: all_reduce((target != ignore_index).sum(), axis, dst=I)."
        )


@torch.library.custom_op("shardmap_torch::read_targets", mutates_args=())
def _read(target: Tensor, index: int, name: str, loss: str) -> Tensor:
    """Reads targets where a graph has them; the loss takes the copy, so that this stays there."""
    _require_all(target, index, name, loss)
    return target.clone()


@_read.register_fake
def _read_nothing(target: Tensor, index: int, name: str, loss: str) -> Tensor:
    return torch.empty_like(target)


@_read.register_vmap
def _read_all(info: Any, in_dims: Any, target: Tensor, index: int, name: str, loss: str) -> Any:
    return _read(target, index, name, loss), in_dims[0]

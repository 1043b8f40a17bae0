"""Runs in which no target of a cross entropy may be ignored.

The mean over ranks of means over their shards is the mean on one device if all shards have the same
number of entries that count. Under global strictness a mean cross entropy over a sharded dim is
accepted for that reason, and each run looks whether a target is `ignore_index`.
"""

from collections.abc import Callable
from functools import wraps
from inspect import signature
from typing import Any, Final

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch.checker.spmd.ops.losses import READING_TARGETS
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError

_SIGNATURES: Final = {function: signature(function) for function in READING_TARGETS}


def counting_all(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the body of `name`, whose averaged cross entropies raise where they leave one out."""

    @wraps(function)
    def counted(*args: Any, **kwargs: Any) -> Any:
        with _Counting(name):
            return function(*args, **kwargs)

    return counted


class _Counting(TorchFunctionMode):
    """Function mode that looks at the targets of losses."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in READING_TARGETS:
            self._require_all(func, _SIGNATURES[func].bind(*args, **(kwargs or {})).arguments)
        return func(*args, **(kwargs or {}))

    def _require_all(self, func: Any, arguments: dict[str, Any]) -> None:
        target, index = arguments["target"], arguments.get("ignore_index", -100)
        if arguments.get("reduction", "mean") != "mean" or target.is_floating_point():
            return
        if _any_is(target, index):
            raise ShardTypeError(
                f"{self._name}: check='global': {func.__name__} averages over a sharded dim, and "
                f"a target is ignore_index={index}: shards that leave out different numbers of "
                "entries have means of different weights.\n"
                f"  at {call_site()}\n"
                "Fix: take reduction='sum', all_reduce it, and divide by the number of entries "
                "that count: all_reduce((target != ignore_index).sum(), axis, dst=I)."
            )


def _any_is(target: Tensor, index: int) -> bool:
    with DisableTorchFunction(), torch.no_grad():
        return bool((base_of(target) == index).any())

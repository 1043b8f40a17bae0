"""Finds the tensors that a function closes over, without running it."""

import functools
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import Any

from torch import Tensor, nn

from shardmap_torch.core.closures import is_empty
from shardmap_torch.core.tree import flatten


def closed_over(function: Callable[..., Any]) -> Iterator[Tensor]:
    """Yields tensors in a function's closure, defaults, partial arguments, modules and globals.

    Goes through containers and through functions that these refer to.

    Example:
        >>> import torch
        >>> w = torch.ones(2)
        >>> [t.shape for t in closed_over(lambda x, scale=w: x * scale)]
        [torch.Size([2])]
    """
    seen: set[int] = set()
    pending: list[Any] = [function]
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, Tensor):
            yield value
        else:
            pending += _referred(value)


def _referred(value: Any) -> list[Any]:
    if isinstance(value, FunctionType):
        return _of_function(value)
    if isinstance(value, functools.partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, nn.Module):
        return [*value.parameters(), *value.buffers()]
    if isinstance(value, tuple | list | dict):
        return flatten(value)[0]
    bound = getattr(value, "__self__", None)
    return [bound, value.__func__] if bound is not None and hasattr(value, "__func__") else []


def _of_function(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if not is_empty(cell)]
    names = function.__code__.co_names
    named = [function.__globals__[name] for name in names if name in function.__globals__]
    wrapped = getattr(function, "__wrapped__", None)
    return [*cells, *(function.__defaults__ or ()), *named, wrapped]

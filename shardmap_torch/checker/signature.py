"""What a verdict depends on: equal signatures have equal programs."""

import builtins
from collections.abc import Callable, Hashable
from types import CodeType, FunctionType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardmap_torch.boundary import Call, can_receive_gradient

_PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_DEVICES: Final = ("cpu", "cuda")


def signature(call: Call) -> Hashable:
    """All that a verdict on `call` depends on and that can be seen from outside the body."""
    return (
        call.structure,
        call.mesh,
        call.mapped,
        call.bound,
        call.fit,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        tuple(
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
            for d in _DEVICES
            if torch.is_autocast_enabled(d)
        ),
        *map(_leaf, call.leaves),
        _surroundings(call.function),
    )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, can_receive_gradient(leaf)
    return type(leaf), leaf


def _surroundings(function: Callable[..., Any]) -> Hashable:
    """What the code of a function refers to: closed-over values, defaults and globals.

    Plain values count by value, tensors and modules by identity and by what changes a program;
    functions of the user's own are followed.
    """
    found: list[Hashable] = []
    seen: set[int] = set()
    _follow(function, found, seen)
    return tuple(found)


def _follow(value: Any, found: list[Hashable], seen: set[int]) -> None:
    if isinstance(value, _PLAIN):
        found.append((type(value), value))
    elif isinstance(value, Tensor):
        found.append((id(value), value.shape, value.dtype, can_receive_gradient(value)))
    elif isinstance(value, nn.Module):
        found.append(_module(value))
    elif isinstance(value, FunctionType):
        _follow_function(value, found, seen)
    elif isinstance(value, tuple | list) and len(value) < 100:
        for item in value:
            _follow(item, found, seen)
    elif not isinstance(value, ModuleType | type):
        found.append(id(value))


def _module(module: nn.Module) -> Hashable:
    flags = tuple(child.training for child in module.modules())
    grads = tuple((id(p), p.requires_grad) for p in module.parameters())
    return id(module), flags, grads


def _follow_function(function: FunctionType, found: list[Hashable], seen: set[int]) -> None:
    if id(function) in seen or _is_library(function):
        return
    seen.add(id(function))
    found.append(id(function.__code__))
    for cell in function.__closure__ or ():
        try:
            _follow(cell.cell_contents, found, seen)
        except ValueError:  # not filled yet
            found.append(None)
    for default in function.__defaults__ or ():
        _follow(default, found, seen)
    for name in _names(function.__code__):
        if name in function.__globals__:
            _follow(function.__globals__[name], found, seen)


def _names(code: CodeType) -> list[str]:
    """Names that the code, and the functions in it, may look up outside."""
    names = [name for name in code.co_names if not hasattr(builtins, name)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names(constant)
    return names


def _is_library(function: FunctionType) -> bool:
    module = function.__module__ or ""
    return module.split(".")[0] in ("torch", "shardmap_torch", "functools")

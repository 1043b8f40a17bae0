"""Modes of torch that code runs under, and runs under again: function modes and autocast."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

from shardmap_torch.core.torch_private.engine import function_mode_stack

LOST: Final[Mapping[Any, str]] = {
    functional.l1_loss: "weight",
    torch.chain_matmul: "out",
    Tensor.dim_order: "ambiguity_check",
}
"""The argument that torch 2.13 leaves out where it hands one of its functions to a mode."""


class FunctionMode(TorchFunctionMode):
    """Function mode whose `call` gets what was given, also where torch loses a part of it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        return self.call(func, args, _whole(func, kwargs) if func in LOST else kwargs)

    def call(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Calls a function of torch, or does something else in its place."""
        return func(*args, **kwargs)


def _whole(func: Any, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns the keyword arguments with the lost one, which the function that is called has."""
    frame, name = sys._getframe(), LOST[func]
    while name not in kwargs and frame.f_back is not None:
        frame = frame.f_back
        if frame.f_code is func.__code__:
            return {**kwargs, name: frame.f_locals[name]}
    return kwargs


@contextmanager
def with_function_modes(modes: Sequence[TorchFunctionMode]) -> Iterator[None]:
    """Enters modes that were active where code ran first, such as a default device, for its rerun.

    Those that are active now are left alone.
    """
    active = {id(mode) for mode in function_mode_stack()}
    with ExitStack() as stack:
        for mode in modes:
            if id(mode) not in active:
                stack.enter_context(mode)
        yield


AutocastState: TypeAlias = tuple[tuple[str, bool, torch.dtype], ...]
"""Device types, with whether autocast is enabled there, and its dtype."""


def autocast_state() -> AutocastState:
    """Returns the state of this thread."""
    kinds = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]
    states = [(k, torch.is_autocast_enabled(k), torch.get_autocast_dtype(k)) for k in kinds]
    return tuple(states)


@contextmanager
def with_autocast(state: AutocastState) -> Iterator[None]:
    """Restores a state in this context."""
    with ExitStack() as stack:
        for kind, enabled, dtype in state:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
        yield


@contextmanager
def without_autocast() -> Iterator[None]:
    """Leaves dtypes alone: autocast promotes what `cat` and `stack` get, and refuses float16.

    Example:
        >>> with torch.autocast("cpu", torch.bfloat16), without_autocast():
        ...     torch.stack([torch.ones(2, dtype=torch.float16)]).dtype
        torch.float16
    """
    if not torch.is_autocast_enabled("cpu"):
        yield
        return
    with torch.autocast("cpu", enabled=False):
        yield

"""Function modes that get all arguments of the functions that they see."""

import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, Final

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

"""Refuses, in batched bodies, what `torch.func.vmap` drops without a word.

The checker finds it before a checked body runs; an unchecked one is watched while it runs.
"""

import sys
from types import FrameType
from typing import Any, Final

from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardmap_torch.checker.interpreter.modes import is_user
from shardmap_torch.checker.ir.own_functions import (
    GRAD_FN,
    HOOKS,
    has_saving_hooks,
    name_of_hook,
)
from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.errors import TransformError

_ASKS: Final = Tensor.requires_grad.__get__  # type: ignore[attr-defined]  # torch's stubs: a bool


def rank_only(name: str, what: str) -> TransformError:
    """Builds the error of a batched body that has something that only single ranks run."""
    return TransformError(
        f"{name}: one batched program drops, or cannot run, what single ranks run: {what}\n"
        'Fix: use make_mesh(..., simulate="auto"), which runs such bodies as ranks, or "ranks".'
    )


class RefusingDropped(TorchFunctionMode):
    """Function mode of an unchecked batched body: hooks, and questions for `requires_grad`.

    Raises:
        TransformError: the body registers a hook, or asks whether a tensor requires a gradient.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name, self._has_outer = name, has_saving_hooks()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Calls a function of torch, unless a batched tensor would drop what it does."""
        what = self._dropped(func, sys._getframe(1))
        if what is not None:
            raise rank_only(self._name, f"{what}.\n  at {call_site()}")
        return func(*args, **(kwargs or {}))

    def _dropped(self, func: Any, asker: FrameType) -> str | None:
        if func == _ASKS:
            return "a question for requires_grad" if is_user(asker) else None
        if func in HOOKS and not (func == GRAD_FN and is_own(asker)):
            return name_of_hook(func)
        return "saved_tensors_hooks" if has_saving_hooks() and not self._has_outer else None

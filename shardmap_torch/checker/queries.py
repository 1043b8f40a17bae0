"""Queries of layers and optimizers while a body is checked; in a run they cost nothing."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from torch import Tensor

from shardmap_torch.checker.assertions import types_in_check
from shardmap_torch.checker.interpreter.modes import current_interpreter
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.region import local_region, note_region
from shardmap_torch.core.tree import flatten
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType


def types_now(x: Tensor) -> Mapping[str, AxisType] | None:
    """Returns the types of `x` along each axis in a check, and None in a run.

    Unlike `typeof`, it is no step of the program.
    """
    interpreter = current_interpreter()
    return None if interpreter is None else types_in_check(interpreter, x)


def in_place_of_batched() -> AbstractContextManager[object]:
    """Returns a context for operators in a check that batched bodies do without."""
    interpreter = current_interpreter()
    return nullcontext() if interpreter is None else interpreter.batching()


def call_region(
    function: Callable[..., Any],
    types: Callable[[Sequence[P], Sequence[int]], tuple[Any, Any]],
    *args: Tensor,
) -> Any:
    """Calls a `local_region` whose types follow from the layouts of its arguments.

    Args:
        function: takes tensors.
        types: computes `in_types` and `out_types` from the arguments' layouts and numbers of dims.
        args: the tensors.
    """
    interpreter = current_interpreter()
    if interpreter is None:
        return function(*args)
    observer = interpreter.observer
    # Not under global strictness, or computed again in a backward: layouts are unknown.
    if observer is UNOBSERVED or observer.is_ignored:
        out = function(*args)
        note_region(interpreter, function.__name__, args, flatten(out)[0])
        return out
    layouts = [observer.spec_of(interpreter.fakify(x)) or P() for x in args]
    in_types, out_types = types(layouts, [x.ndim for x in args])
    return local_region(function, in_types, out_types)(*args)

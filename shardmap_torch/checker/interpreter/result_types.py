"""The types of an operation's results, or the error that it has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.calls.draws import drawn_types
from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.rules.infer import (
    Refusal,
    Types,
    each_axis,
    is_in_linear_backward,
    is_real,
    rounding,
    tensors_of,
    type_call,
    writes_of,
)
from shardmap_torch.checker.rules.lattice import Outcome, plain
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.types import AxisType, I, K, R, V

_SEED: Final = torch.ops.aten.ones_like.default


def result_types(
    interpreter: Interpreter,
    op: OpOverload,
    arguments: Mapping[str, Any],
    results: Sequence[tuple[int, Tensor]],
) -> list[Types]:
    """Returns the types of each result, given with its position; one entry if all are alike.

    Raises:
        ShardTypeError: the types of the operands do not go together.
    """
    made = results or [
        *enumerate(x for name in writes_of(op, arguments) for x in tensors_of(arguments[name]))
    ]
    any_real = any(is_real(tensor.dtype) for _, tensor in made)

    def read(tensor: Tensor) -> Types:
        types = interpreter.types(tensor)
        # A result that is not real has no derivative that could be wrong, but it may select
        # what is differentiated.
        if any_real or interpreter.is_cotangent(interpreter.storage_type(tensor)):
            return types
        return tuple(K if k in (I, R) else k for k in types)

    types = []
    drawn = drawn_types(interpreter, op, arguments)
    for outcome in type_call(op, arguments, read, len(interpreter.axes), drawn):
        if isinstance(outcome, Refusal):
            raise messages.refused(interpreter, op, arguments, outcome)
        types.append(outcome)
    if not is_in_linear_backward():
        rounded = rounding(op, arguments, [tensor for _, tensor in made], types, read)
        if rounded is not None:
            raise messages.refused(interpreter, op, arguments, rounded)
    if op is _SEED and interpreter.running:
        return _as_seed(interpreter, arguments["self"], types)
    return types


def _as_seed(interpreter: Interpreter, value: Tensor, types: Sequence[Types]) -> list[Types]:
    """Types the cotangent from which a backward inside of a custom backward starts.

    The mode of torch functions, which does that in the body, is not active there; see
    `gradients.seed`.
    """
    pairs = zip(interpreter.storage_type(value).types, types[0], strict=True)
    return [tuple([V if plain(own) == V else axis_type for own, axis_type in pairs])]


def combined(
    interpreter: Interpreter,
    rule: Callable[[Sequence[AxisType]], Outcome],
    op: OpOverload,
    arguments: Mapping[str, Any],
    types: Sequence[Types],
) -> Types:
    """Returns what a rule of the lattice makes of types that are written into one storage."""
    outcome = each_axis(rule, types, len(interpreter.axes))
    if isinstance(outcome, Refusal):
        raise messages.refused(interpreter, op, arguments, outcome)
    return outcome


def name_of(op: OpOverload) -> str:
    """Returns an operation's name without namespace and overload."""
    return op._schema.name.split("::")[1]

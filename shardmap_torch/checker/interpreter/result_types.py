"""The types of an operation's results, or the error that it has none."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.own_functions import name_of_own
from shardmap_torch.checker.ir.program import StorageType, varying
from shardmap_torch.checker.rules.infer import (
    Types,
    draws,
    each_axis,
    is_in_linear_backward,
    is_real,
    may_draw,
    rounding,
    signature_of,
    tensors_of,
    type_call,
    writes_of,
)
from shardmap_torch.checker.rules.lattice import Outcome, Refusal
from shardmap_torch.collectives.scope import Scope, current_scope
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
    current_autograd_node,
    top_saved_tensors_hooks,
)
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType, I, K, R, V


def draw_of(op: OpOverload) -> tuple[str, str]:
    """Returns how a draw is recorded, in place or not: functorch makes one of the other."""
    return "draw", op._schema.name.removesuffix("_")


def drawn_types(
    interpreter: Interpreter, op: OpOverload, arguments: Mapping[str, Any]
) -> Types | None:
    """Returns V along the axes over which the ranks draw different numbers, K along the others.

    Records the draw for the runs, or returns None if they do not seed it: one from the user's own
    generator, or inside of an operator. Another path with other types is a ShardTypeError.
    """
    if not may_draw(op) or not draws(op, arguments):
        return None
    interpreter.needs_ranks("a draw of random numbers")
    scope = current_scope()
    seeded = arguments.get("generator") is None and not interpreter.is_decomposing
    if scope is None or scope.monitor is None or not seeded:
        return None
    _reject_recomputed(interpreter, op)
    interpreter.traits.draws = True
    own = _own_axes(interpreter, scope, op, arguments)
    types = tuple(V if at in own else K for at in range(len(interpreter.axes)))
    note, advice = scope.monitor.note(draw_of(op)), "draw before it, or from a random key."
    interpreter.note_types(note, types, "a draw is", advice)
    return types


def _reject_recomputed(interpreter: Interpreter, op: OpOverload) -> None:
    """Refuses draws within torch's own checkpoint, which draws others when it runs again."""
    top = top_saved_tensors_hooks(True)
    if top is not None and getattr(top[0], "__module__", "") == "torch.utils.checkpoint":
        raise ShardTypeError(
            f"{interpreter.name}: {name_of(op)} draws within torch's own checkpoint, which would "
            f"draw other numbers in the backward.\n  at {interpreter.site()[0]}\n"
            "Fix: shardmap_torch.checkpoint(f, *args) in place of "
            "torch.utils.checkpoint.checkpoint."
        )


def _own_axes(
    interpreter: Interpreter, scope: Scope, op: OpOverload, arguments: Mapping[str, Any]
) -> frozenset[int]:
    """Returns the axes, by position, over which each rank draws its own numbers."""
    outs = signature_of(op).outs
    given = [value for name, value in arguments.items() if name not in outs]
    read = [interpreter.storage_type(tensor) for value in given for tensor in tensors_of(value)]
    if all(map(_is_from_nothing, read)):
        sizes = interpreter.mesh.shape  # the one rank of an axis draws what all of its ranks do
        bound = [sizes[axis] > 1 and axis in scope.axes for axis in interpreter.axes]
        return frozenset(at for at, has_ranks in enumerate(bound) if has_ranks)
    # Memory without a type yet, as of empty_like, is batched like its model.
    return frozenset[int]().union(*(varying(each.types) | each.batched_over for each in read))


def _is_from_nothing(storage_type: StorageType) -> bool:
    """Returns whether a factory made it, such as the memory of `torch.empty(3).uniform_()`."""
    made = storage_type.made
    return made is not None and not made.operands and not varying(storage_type.types)


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
    shared = _shared_factors(interpreter, op, arguments)

    def read(tensor: Tensor) -> Types:
        types = interpreter.types(tensor)
        if shared:
            types = tuple(K if at in shared and k == I else k for at, k in enumerate(types))
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
    return types


def _shared_factors(
    interpreter: Interpreter, op: OpOverload, arguments: Mapping[str, Any]
) -> frozenset[int]:
    """Returns the axes over which a product takes a whole cotangent as each rank's factor.

    In a backward of the user's own each rank multiplies what all have in common by its own part:
    that of a sum of exponentials is the sum's cotangent times the part's. The product varies, so
    that it is no gradient of an operand that does not; a sum of both stays refused. Where autograd
    records the backward, another one would need the sum over ranks.
    """
    if op not in _PRODUCTS or not interpreter.running or torch.is_grad_enabled():
        return frozenset()
    if name_of_own(current_autograd_node()) is None:
        return frozenset()
    read = [x for value in arguments.values() for x in tensors_of(value)]
    return frozenset[int]().union(*(varying(interpreter.types(x)) for x in read))


_PRODUCTS: Final = (
    *(torch.ops.aten.mul.Tensor, torch.ops.aten.mul_.Tensor),
    *(torch.ops.aten.mm.default, torch.ops.aten.bmm.default),
)


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

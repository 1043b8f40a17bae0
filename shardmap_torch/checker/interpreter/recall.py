"""Types a call like an equal one that came before: layers of a network repeat the same calls.

New calls, and calls in rare states of the interpretation, are typed by `operations`, which
also raises every error.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from shardmap_torch.checker.interpreter.custom_functions import reject_unseen
from shardmap_torch.checker.ir.fake_results import (
    CallLookup,
    Result,
    describe_call,
    described,
    look_up,
    make,
)
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.program import Equation, StorageType, Use
from shardmap_torch.checker.ir.rank_only import has_saving_hooks, is_rank_only
from shardmap_torch.checker.rewrites.copies import is_marked
from shardmap_torch.checker.rules.infer import (
    draws,
    is_in_linear_backward,
    may_draw,
    name_arguments,
    signature_of,
)
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import OpOverload

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter, Outcome

_NONE: Final = frozenset[Any]()
_UNLIKE: Final = frozenset((torch.ops.aten.view.dtype, torch.ops.aten.ones_like.default))
"""Calls whose results depend on more: bits have no type, and backwards start from ones."""


@dataclass(slots=True)
class Found:
    """A call that has been looked up.

    Attributes:
        call: what it was looked up by.
        storage_types: those of its operands.
        known: what is known of such calls; None for the first.
        outcome: types and batched axes of its results; None for the first with such operands.
    """

    call: CallLookup
    storage_types: list[StorageType]
    known: Result | None
    outcome: "Outcome | None"


def find(
    interpreter: "Interpreter", op: Any, args: Sequence[Any], kwargs: Mapping[str, Any] | None
) -> Found | None:
    """Looks a call up; None where it cannot be remembered."""
    # Hooks run the user's code at each tensor that autograd saves, equal calls included.
    if interpreter.is_special or has_saving_hooks():
        return None
    call = look_up(interpreter.fake, op, args, kwargs)
    if call is None:
        return None
    types = interpreter.types_by_storage
    try:
        storage_types = [types[seen[2]] for seen in call.seen]
    except KeyError:  # a tensor without a type, which the full road reports
        return None
    known = described(call)
    if known is None or known.number is None:
        return Found(call, storage_types, None, None)
    found = Found(call, storage_types, known, ((), _NONE))
    if not known.is_view:
        found.outcome = interpreter.remembered.outcomes.get(_situation(interpreter, found, known))
    return found


def _situation(interpreter: "Interpreter", found: Found, known: Result) -> tuple[Any, ...]:
    """Returns the call, the types of its operands as they are read, and what batches them."""
    situation: list[Any] = [known.number]
    number_of = interpreter.remembered.number_of
    for tensor, storage_type in zip(found.call.tensors, found.storage_types, strict=True):
        _, number, freed = number_of(storage_type.types)
        read = number
        if number != freed and not (storage_type.tasks and interpreter.is_cotangent(storage_type)):
            # As `TypeStore.types` and `result_types` have it.
            if not known.is_real or not interpreter.flows(tensor):
                read = freed
        situation += (number, read, storage_type.batched_over)
    return tuple(situation)


def learn(
    interpreter: "Interpreter",
    found: Found | None,
    op: OpOverload,
    args: Sequence[Any],
    arguments: Mapping[str, Any],
) -> None:
    """Remembers the call that has just been typed, if all that matters is in `found`."""
    if found is None or op in _UNLIKE or is_rank_only(op):
        return
    if may_draw(op) and draws(op, arguments):
        return
    # The node decides the rule in a linear backward, and the key does not say which runs.
    if signature_of(op).branches or is_in_linear_backward():
        return
    equation = interpreter.equations[-1]
    known = found.known or describe_call(found.call, op, equation.literals, args)
    if known is not None and not known.is_view:
        made = [use.storage_type for use in equation.results]
        outcome = [each.types for each in made], made[0].batched_over if made else _NONE
        situation = _situation(interpreter, found, known)
        interpreter.remembered.outcomes[situation] = outcome


def repeat(
    interpreter: "Interpreter", op: OpOverload, args: Sequence[Any], kwargs: Any, found: Found
) -> Any:
    """Types a call as before, and makes its result; NotImplemented where it must be typed again."""
    known, outcome = found.known, found.outcome
    if known is None or outcome is None:
        return NotImplemented
    site, backward = None, False
    if running_backward() == NO_BACKWARD:
        site = call_site()
    elif not interpreter.running or is_in_linear_backward():
        return NotImplemented
    else:
        reject_unseen(interpreter)
        site, backward = interpreter.site()
    call, storage_types = found.call, found.storage_types
    out = make(interpreter.fake, known, call.tensors)
    uses = []
    for name, at in known.operands:
        storage_type, (*_, shape, dtype) = storage_types[at], call.seen[at]
        number = call.tensors[at].__dict__.get("_shardmap_number")
        uses.append(Use(name, storage_type, storage_type.types, dtype, shape, number))
    equation = Equation(known.name, tuple(uses), (), site, backward)
    equation.literals = known.literals
    types, batched_over = outcome
    tokens = interpreter.tokens_of(call.tensors, storage_types)
    descent = tokens, interpreter.tasks_of(storage_types), batched_over
    interpreter.type_results(equation, enumerate(known.tensors(out)), types, *descent)
    interpreter.add(equation)
    if interpreter.copies.any and known.is_view and any(map(is_marked, call.tensors)):
        interpreter.copies.follow(interpreter, {"": call.tensors}, [], out, True)
    if not (interpreter.observer is UNOBSERVED or interpreter.observer.is_ignored):
        arguments = name_arguments(op, args, kwargs or {})
        interpreter.observer.on_call(op, arguments, out, call.key)
    return out

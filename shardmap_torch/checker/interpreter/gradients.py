"""Types the cotangents that a backward in a body starts from, and the gradients it returns.

A value that is equal on all ranks has one gradient, of which each rank has an addend if the loss
varies: the body gets it as a pending sum, Partial. So a step that forgets to sum is rejected where
it uses the gradient, not at the end.
"""

from collections.abc import Sequence
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.ir.program import Equation, use_of
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import accepts, plain
from shardmap_torch.core.functorch import base_of, dims_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.types import COTANGENT, K, Partial, R, V, Z

_EQUAL: Final = frozenset({R, K, Z})
"""Types of values that are equal on all ranks, and whose gradient may be a pending sum."""


def seed(interpreter: Interpreter, output: Tensor, cotangent: Tensor | None) -> Tensor | None:
    """Checks the cotangent that a backward in the body starts from, or makes and types one."""
    if isinstance(output, torch.autograd.graph.GradientEdge) or not output.requires_grad:
        return cotangent
    have = interpreter.storage_type(output).types
    if cotangent is None:
        if R in have:
            raise messages.seeded(interpreter, have.index(R), interpreter.storage_type(output))
        if output.numel() != 1:
            return None  # torch says why it needs one
        cotangent = torch.ones_like(output)
        # A varying value's cotangent is each rank's own.
        interpreter.storage_type(cotangent).types = tuple(COTANGENT.get(t, K) for t in have)
    cotangents = interpreter.storage_type(cotangent).types
    for axis, (axis_type, dual) in enumerate(zip(have, cotangents, strict=True)):
        if not accepts(axis_type, dual):
            what = "the differentiated value"
            raise messages.cotangent(
                interpreter, axis, axis_type, interpreter.storage_type(cotangent), what
            )
    # The cotangents of a varying value are each rank's own, even if they are equal.
    return interpreter.retyped(cotangent, lambda at, dual: V if plain(have[at]) == V else dual)


def check_gradient(interpreter: Interpreter, operand: Tensor, gradient: Tensor | None) -> None:
    """Checks the type of a gradient against that of its value."""
    if gradient is None:
        return
    have, storage_type = interpreter.storage_type(operand).types, interpreter.storage_type(gradient)
    for axis, (axis_type, cotangent) in enumerate(zip(have, storage_type.types, strict=True)):
        if not accepts(axis_type, cotangent):
            what = "the value it is the gradient of"
            raise messages.cotangent(interpreter, axis, axis_type, storage_type, what)


def hand_over(
    interpreter: Interpreter,
    operands: Sequence[Tensor],
    gradients: Sequence[Tensor | None],
    old: Sequence[Tensor | None] = (),
) -> tuple[Tensor | None, ...]:
    """Types the gradients that a body gets: V becomes Partial if the value is equal on all ranks.

    Args:
        interpreter: has their types.
        operands: the values.
        gradients: the gradient of each.
        old: tensors in `.grad` that the backward has added to. Such a one stays the same tensor,
            which the body may refer to elsewhere.

    Returns:
        The gradients; new ones whose type changes as copies, since a gradient of autograd may share
        memory with a cotangent, or with the gradient of a varying value.
    """
    added_to = {*map(id, old)}
    handed = []
    for operand, gradient in zip(operands, gradients, strict=True):
        if gradient is not None and id(gradient) in added_to:
            # Others may hold this tensor, so that no copy can stand for it.
            own = interpreter.storage_type(gradient)
            own.types = _summed(interpreter.storage_type(operand).types, own.types)
        elif gradient is not None:
            gradient = _handed_over(interpreter, operand, gradient)
        handed.append(gradient)
    return tuple(handed)


def _summed(types: Types, gradient: Types) -> Types:
    """Returns the types of a gradient that a body gets, given those of its value."""
    return tuple(
        Partial if axis_type in _EQUAL and plain(have) == V else have
        for axis_type, have in zip(types, gradient, strict=True)
    )


def _is_of_each(interpreter: Interpreter, operand: Tensor, gradient: Tensor) -> bool:
    """Returns whether a vmap batches a gradient, and not its value, and layouts say how."""
    batched = dims_of(gradient)[1].keys() - dims_of(operand)[1].keys()
    return bool(batched) and interpreter.observer is not UNOBSERVED


def _handed_over(interpreter: Interpreter, operand: Tensor, gradient: Tensor) -> Tensor:
    storage_type = interpreter.storage_type(gradient)
    types = _summed(interpreter.storage_type(operand).types, storage_type.types)
    if types == storage_type.types:
        return gradient
    if _is_of_each(interpreter, operand, gradient):
        reduced = interpreter.repair.gradients.get(call_site())
        return gradient if reduced is None else reduced.apply(gradient)
    with interpreter.unrecorded():  # in forward mode tangents are copied too
        handed_over = gradient.clone()
        copies = [made.storage_type for each in interpreter.equations for made in each.results]
    base = base_of(gradient)
    use = use_of("gradient", base, storage_type)
    equation = Equation(messages.GRADIENT, (use,), (), call_site(), False)
    for copy in copies:
        copy.types = _summed(interpreter.storage_type(operand).types, copy.types)
        copy.made = equation
    interpreter.make(base_of(handed_over), types, equation, [base])
    interpreter.add(equation)
    return handed_over


def sum_by_repair(
    interpreter: Interpreter, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Applies the sums of gradients of the repair that is tried."""
    if not interpreter.repair.gradients:
        return tuple(gradients)
    return tuple(g if g is None else _summed_by_repair(interpreter, g) for g in gradients)


def _summed_by_repair(interpreter: Interpreter, gradient: Tensor) -> Tensor:
    storage_type = interpreter.storage_type(gradient)
    made = storage_type.made
    if made is None or made.name != messages.GRADIENT:
        return gradient
    reduced = interpreter.repair.gradients.get(made.site)
    types = interpreter.by_axis(storage_type.types)
    pending = [axis for axis, have in types.items() if have == Partial]
    return gradient if reduced is None or reduced.axis not in pending else reduced.apply(gradient)

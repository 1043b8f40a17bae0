"""Differentiations in a body: the cotangents they start from, and the gradients they return.

A value that is equal on all ranks has one gradient, of which each rank has an addend if the loss
varies: the body gets it as a pending sum, Partial. So a step that forgets to sum is rejected where
it uses the gradient, not at the end.
"""

import sys
from collections.abc import Mapping, Sequence
from inspect import signature
from types import FrameType
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.cotangents import parts_of, retyped
from shardmap_torch.checker.interpreter.custom_functions import watch
from shardmap_torch.checker.interpreter.interpreter import Interpreter, Setting
from shardmap_torch.checker.ir.program import Equation, use_of
from shardmap_torch.checker.ir.repairs import rejection_of
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import accepts, plain
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.functorch import base_of, dims_of
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    functorch,
    gradient_of_transform,
    set_grad_enabled,
    vmapping_by_autograd,
)
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import COTANGENT, I, K, Partial, R, V, Z

_TAKES_GRADIENT: Final = gradient_of_transform.__code__
_EQUAL: Final = frozenset({R, K, Z})
"""Types of values that are equal on all ranks, and whose gradient may be a pending sum."""


def _seeds(
    interpreter: Interpreter, outputs: Sequence[Tensor], given: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """Checks the cotangents that a backward in the body starts from, or makes and types them.

    Where gradients of several values, or of the user's own code, may meet, those that are equal on
    all ranks make their values I: they are no addends beside those of another.
    """
    meet = len(outputs) > 1 or interpreter.may_be_addends
    return [_seed(interpreter, x, y, meet) for x, y in zip(outputs, given, strict=True)]


def _seed(
    interpreter: Interpreter, output: Tensor, cotangent: Tensor | None, meet: bool
) -> Tensor | None:
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
    duals = interpreter.storage_type(cotangent).types
    parts = parts_of(interpreter, have, cotangent)
    for at, (own, dual) in enumerate(zip(have, duals, strict=True)):
        if at not in parts and not accepts(own, dual):
            what, storage_type = "the differentiated value", interpreter.storage_type(cotangent)
            error = messages.cotangent(interpreter, at, own, storage_type, what)
            rejection_of(error).may_be_addend = dual == K
            raise error
    # The cotangents of a varying value are each rank's own, even if they are equal.
    varying = {at for at, each in enumerate(have) if plain(each) == V} | parts
    one = {at for at, each in enumerate(have) if meet and each == K} - parts
    types = [
        V if at in varying else I if at in one and dual == K else dual
        for at, dual in enumerate(duals)
    ]
    return retyped(interpreter, cotangent, types, parts)


def _given(
    given: Sequence[Tensor | None], seeds: Sequence[Tensor | None]
) -> Sequence[Tensor | None]:
    """Returns, typed, the cotangents that the body has given."""
    return [None if own is None else typed for own, typed in zip(given, seeds, strict=True)]


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
    losses: Sequence[Tensor],
    old: Sequence[Tensor | None] = (),
) -> tuple[Tensor | None, ...]:
    """Types the gradients that a body gets: V becomes Partial if the value is equal on all ranks.

    Args:
        interpreter: has their types.
        operands: the values.
        gradients: the gradient of each.
        losses: what is differentiated.
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
            gradient = _handed_over(interpreter, operand, gradient, losses)
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
    return bool(batched) and interpreter.observer.compares


def _handed_over(
    interpreter: Interpreter, operand: Tensor, gradient: Tensor, losses: Sequence[Tensor]
) -> Tensor:
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
    interpreter.losses[equation] = [interpreter.types(base_of(loss)) for loss in losses]
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


# ------------------------------------------------------------------------ functions of torch


def _requires_grad(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    out = func(*args, **kwargs)
    if functorch.is_functorch_wrapped_tensor(out):
        interpreter.mark_differentiated(out)
    else:
        interpreter.needs_ranks("requires_grad_")
    return out


def _as_tuple(value: Any) -> tuple[Any, ...]:
    return (value,) if isinstance(value, Tensor) or value is None else tuple(value)


def _grad(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    given = {**dict(zip(_GRAD, args, strict=False)), **kwargs}
    if given.get("is_grads_batched"):
        return _batched(interpreter, func, given)
    outputs = _as_tuple(given["outputs"])
    given_seeds = _as_tuple(given.get("grad_outputs")) or (None,) * len(outputs)
    if len(given_seeds) == 1:
        given_seeds = given_seeds * len(outputs) if given_seeds[0] is None else given_seeds
    _require_gradients(interpreter, "torch.autograd.grad", outputs)
    watch(interpreter, outputs)
    if interpreter.goes_on(given_seeds):
        return func(*args, **kwargs)
    interpreter.traits.takes_gradients = True
    seeds = tuple(_seeds(interpreter, outputs, given_seeds))
    given["outputs"], given["grad_outputs"] = outputs, seeds
    in_transform = any(map(functorch.is_functorch_wrapped_tensor, outputs))
    interpreter.needs_ranks(None if in_transform else "torch.autograd.grad")
    inputs = _as_tuple(given["inputs"])
    ending = Setting(interpreter, ending_levels=interpreter.ending_levels | _ending(outputs))
    with interpreter.differentiating(seeds), ending:
        grads = interpreter.observer.assume_gradients(interpreter, outputs, inputs)
        grads = grads or func(**given)
    for operand, gradient in zip(inputs, grads, strict=True):
        check_gradient(interpreter, operand, gradient)
    grads = hand_over(interpreter, inputs, grads, outputs)
    interpreter.observer.on_gradient(outputs, _given(given_seeds, seeds), inputs, grads)
    return sum_by_repair(interpreter, grads)


_GRAD: Final = tuple(signature(torch.autograd.grad).parameters)


def _batched(interpreter: Interpreter, func: Any, given: dict[str, Any]) -> Any:
    """Interprets gradients for a batch of cotangents by `torch.func.vmap` of those for one.

    torch batches them by a vmap of its own, without levels that tell what is batched.
    """
    cotangents = map(interpreter.fakify, _as_tuple(given.pop("grad_outputs")))
    given["is_grads_batched"] = False
    unused: list[bool] = []

    def one(*each: Tensor) -> tuple[Tensor, ...]:
        grads = _grad(interpreter, func, (), {**given, "grad_outputs": each})
        unused[:] = [gradient is None for gradient in grads]
        return tuple(gradient for gradient in grads if gradient is not None)

    with vmapping_by_autograd():
        found = iter(torch.func.vmap(one)(*cotangents))
    return tuple([None if is_unused else next(found) for is_unused in unused])


def _require_gradients(interpreter: Interpreter, name: str, outputs: Sequence[Any]) -> None:
    """Requires that a differentiation in the body has something to differentiate by."""
    if not any(x.requires_grad for x in outputs if isinstance(x, Tensor)):
        raise ShardTypeError(
            f"{interpreter.name}: {name} at {call_site()}: no argument that the value is made of "
            "requires a gradient.\nFix: take it in the body with value, gradients = "
            "shardmap_torch.value_and_grad(loss)(params); or pass tensors that require gradients, "
            "and call backward() on the result, outside."
        )


def _ending(outputs: Sequence[Any]) -> frozenset[int]:
    """Returns the level of the transform that takes its gradient; none if the body does."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not torch.autograd.grad.__code__:
        frame = frame.f_back
    if frame is None or frame.f_back is None or frame.f_back.f_code is not _TAKES_GRADIENT:
        return frozenset()
    return frozenset({max(int(functorch.maybe_get_level(x)) for x in outputs)})


def _backward(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Interprets `Tensor.backward`, which is `torch.autograd.backward` of one value."""
    names = ("tensors", "grad_tensors", "retain_graph", "create_graph", "inputs")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    given |= {name: given.pop(own) for own, name in _RENAMED if own in given}
    _several_backward(interpreter, torch.autograd.backward, (), given)


_RENAMED: Final = (("self", "tensors"), ("gradient", "grad_tensors"))
"""Names of arguments of `Tensor.backward`, and of `torch.autograd.backward`."""


def _several_backward(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    """Interprets `torch.autograd.backward`, which adds gradients to `.grad`."""
    names = ("tensors", "grad_tensors")
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    rest = args[len(names) :]
    outputs = _as_tuple(given.pop("tensors"))
    listed = given.pop("grad_tensors", None)
    given_seeds = (None,) * len(outputs) if listed is None else _as_tuple(listed)
    if len(given_seeds) != len(outputs) or not all(isinstance(x, Tensor) for x in outputs):
        return func(*args, **kwargs)  # torch says what is wrong
    _require_gradients(interpreter, "backward()", outputs)
    inputs = _as_tuple(given.get("inputs"))
    if not all(x.is_leaf for x in inputs if isinstance(x, Tensor)):
        raise ShardTypeError(
            f"{interpreter.name}: backward() at {call_site()} names a tensor in inputs= that is no "
            "leaf.\nFix: take its gradient with torch.autograd.grad."
        )
    nodes = graph_nodes([output.grad_fn for output in reversed(outputs)])  # the first comes first
    reached = [getattr(node, "variable", None) for node in nodes]
    leaves = list({id(leaf): leaf for leaf in reached if isinstance(leaf, Tensor)}.values())
    if any(not isinstance(base_of(leaf), FakeTensor) for leaf in leaves):
        raise ShardTypeError(
            f"{interpreter.name}: backward() at {call_site()} would write into the .grad of a "
            "closed-over tensor.\nFix: pass the tensor as an argument, and return its gradient."
        )
    watch(interpreter, outputs)
    if interpreter.goes_on(given_seeds):
        return func(outputs, given_seeds, *rest, **given)
    seeds = _seeds(interpreter, outputs, given_seeds)
    interpreter.traits.takes_gradients = True
    interpreter.needs_ranks("backward")
    before = _fields(leaves)
    equal = [() if x is None else interpreter.storage_type(x).types for x in before]
    with interpreter.differentiating(seeds):
        func(outputs, seeds, *rest, **given)
    grads = _fields(leaves)
    for leaf, gradient, types in zip(leaves, grads, equal, strict=True):
        check_gradient(interpreter, leaf, gradient)
        _check_added(interpreter, types, gradient)
    grads = hand_over(interpreter, leaves, grads, outputs, before)
    _set_fields(interpreter, leaves, grads)
    interpreter.observer.on_gradient(outputs, _given(given_seeds, seeds), leaves, grads, before)
    with torch.no_grad():
        _set_fields(interpreter, leaves, sum_by_repair(interpreter, grads))
    return None


def _check_added(interpreter: Interpreter, before: Types, gradient: Tensor | None) -> None:
    """Refuses the sum of a gradient in `.grad` that ranks have all of, and of one of addends."""
    for at, have in enumerate(before if gradient is not None else ()):
        assert gradient is not None  # by the loop
        if have in (I, R, K) and interpreter.storage_type(gradient).types[at].varies:
            axis = interpreter.axes[at]
            origin = interpreter.storage_type(gradient).origin()
            raise messages.error(
                interpreter,
                f"a gradient of which each rank of {axis!r} has an addend is added to what was in "
                f".grad before, which is {have}: equal on all ranks, that would count n times.",
                [f"  the gradient is from {origin}"],
                "give the first a name of its own, and set .grad to None; or use its value as R, "
                f"with convert(x, {axis!r}, src=I, dst=R).",
                types=[have],
            )


def _fields(leaves: Sequence[Tensor]) -> Sequence[Tensor | None]:
    with DisableTorchFunction():  # the body does not ask
        return [leaf.grad for leaf in leaves]


def _set_fields(
    interpreter: Interpreter, leaves: Sequence[Tensor], grads: Sequence[Tensor | None]
) -> None:
    with interpreter.paused(), DisableTorchFunction():
        for leaf, gradient in zip(leaves, grads, strict=True):
            leaf.grad = gradient


def _grad_field(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    if not isinstance(base_of(args[0]), FakeTensor):
        raise ShardTypeError(
            f"{interpreter.name}: .grad of a closed-over tensor is used at {call_site()}.\n"
            "Fix: pass the tensor, or its gradient, as an argument."
        )
    return func(*args, **kwargs)


def _switch_gradients(interpreter: Interpreter, func: Any, args: Any, kwargs: Any) -> Any:
    if interpreter.switches is not None and not interpreter.is_paused:
        interpreter.switches += args
        interpreter.observer.on_switch(interpreter.switches)
    return func(*args, **kwargs)


FUNCTIONS: Final[Mapping[Any, Any]] = {
    set_grad_enabled: _switch_gradients,
    Tensor.requires_grad_: _requires_grad,
    torch.autograd.grad: _grad,
    Tensor.backward: _backward,
    torch.autograd.backward: _several_backward,
    Tensor.grad.__get__: _grad_field,  # type: ignore[union-attr]  # torch's stubs: a tensor
    Tensor.grad.__set__: _grad_field,  # type: ignore[union-attr]
}
"""Handlers of the functions that differentiate, or have to do with it."""

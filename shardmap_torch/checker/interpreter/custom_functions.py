"""Backwards of the user's own: what they return is held against the operands of the forward.

Grad mode is off in the forward of an `autograd.Function`, so mixing I and V is no error there: the
backward may take the sum that is missing. Whether it does is seen when it runs, and told with the
line of the forward. torch.func transforms make a Function of their own of it at each level.
"""

from collections.abc import Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch._functorch import autograd_function
from torch.autograd import Function
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.user_code import enter_backward, leave_backward
from shardmap_torch.checker.ir.program import Equation, Use, use_of
from shardmap_torch.checker.ir.repairs import propose
from shardmap_torch.checker.rules.infer import Types
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.core.functorch import base_of
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import I, K, Partial, R, V

if TYPE_CHECKING:  # for annotations; what starts a backward calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


def watch(interpreter: "Interpreter", outputs: Sequence[Any]) -> None:
    """Checks the user's own backwards when a backward from `outputs` comes to them."""
    for node, name in own_nodes(outputs):
        if node not in interpreter.watched:
            interpreter.watched.add(node)
            node.register_prehook(partial(enter_backward, interpreter, node, name))
            node.register_hook(partial(_check, interpreter, node, name))


def own_nodes(outputs: Sequence[Any]) -> Iterator[tuple[Node, str]]:
    """Nodes of Functions of the user's own, and their names."""
    seen: set[Node] = set()
    pending = [x.grad_fn for x in outputs if isinstance(x, Tensor)]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        name = name_of_own(node)
        if name is not None:
            yield node, name
        pending += [parent for parent, _ in node.next_functions]


def name_of_own(node: Node | None) -> str | None:
    """The name of the user's own Function whose backward a node is, or None."""
    function = _applied(getattr(node, "_forward_cls", None))
    if function is None or function.__module__.startswith(_NOT_OWN):
        return None
    return function.__name__


_NOT_OWN: Final = ("shardmap_torch.", "torch.utils.checkpoint")
"""Modules of Functions whose backward is the derivative of what they call."""


def _applied(function: type | None) -> type | None:
    """The Function, or that of which a transform has made it."""
    if function is None or function.__module__ != autograd_function.__name__:
        return function
    storage_types = getattr(function.backward, "__closure__", None) or ()  # type: ignore[attr-defined]
    found = (storage_type.cell_contents for storage_type in storage_types)
    return next((f for f in found if isinstance(f, type) and issubclass(f, Function)), None)


def _check(
    interpreter: "Interpreter",
    node: Node,
    name: str,
    gradients: Sequence[Any],
    seeds: Sequence[Any],
) -> tuple[Any, ...]:
    given = [interpreter.storage_type(base_of(seed)).types for seed in seeds if seed is not None]
    gradients = tuple(_as_own(interpreter, gradient, given) for gradient in gradients)
    for gradient, (producer, number) in zip(gradients, node.next_functions, strict=False):
        operand = _operand(interpreter, producer, number)
        if gradient is None or operand is None or operand.shape != tuple(gradient.shape):
            continue
        storage_type = interpreter.storage_type(base_of(gradient))
        for axis, axis_type, have in zip(
            interpreter.axes, operand.types, storage_type.types, strict=True
        ):
            if axis_type == I and plain(have) in (V, Partial):
                raise _wrong(interpreter, node, name, axis, operand, have, storage_type)
    leave_backward(interpreter, node, name, gradients)
    return gradients


def _as_own(interpreter: "Interpreter", gradient: Any, given: Sequence[Types]) -> Any:
    """A gradient that does not come from the cotangents, such as a constant, is each rank's own.

    Where the results are equal on all ranks, so is what the ranks have used: one computation. Else
    each has used it for results of its own, and all of their gradients add up, also equal ones.
    """
    if gradient is None or interpreter.goes_on([gradient]):
        return gradient
    types = interpreter.storage_type(base_of(gradient)).types
    own = tuple(
        V
        if axis_type in (I, R, K) and any(plain(seed[at]) in (V, R) for seed in given)
        else axis_type
        for at, axis_type in enumerate(types)
    )
    if own == types:
        return gradient
    gradient = gradient.clone()
    interpreter.storage_type(base_of(gradient)).types = own
    return gradient


def _operand(interpreter: "Interpreter", producer: Node | None, number: int) -> Use | None:
    """The operand, as it was: an input, or what its producer made."""
    variable = getattr(producer, "variable", None)
    if isinstance(variable, Tensor):
        storage_type = interpreter.storage_type(variable)
        return use_of("", variable, storage_type, storage_type.types)
    made: Equation | None = interpreter.equation_of(producer)
    return made.results[number] if made is not None and number < len(made.results) else None


def _wrong(
    interpreter: "Interpreter",
    node: Node,
    name: str,
    axis: str,
    operand: Use,
    have: Any,
    storage_type: Any,
) -> ShardTypeError:
    applied = interpreter.equation_of(node)
    site = applied.site if applied is not None else None
    found = ShardTypeError(
        "\n".join(
            [
                f"{interpreter.name}: over {axis!r}, an operand of {name} is I and its backward "
                f"gives it a gradient that is {have}: {messages.wrong(I, have)}.",
                f"  at {site}",
                f"  the operand is {operand}, from {operand.storage_type.origin()}",
                f"  the gradient is from {storage_type.origin()}",
                f"Fix: give it the operand as R, with convert(x, {axis!r}, src=I, dst=R), or sum "
                "the gradient in the backward of a shardmap_torch.Function.",
            ]
        )
    )
    at = interpreter.axes.index(axis)
    return propose(found, list(messages.repairs_to(interpreter, operand.storage_type, at, R)))

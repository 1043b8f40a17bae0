"""The user's own code that autograd runs: Functions with a backward of their own, and hooks.

Grad mode is off in the forward of an `autograd.Function`, so mixing I and V is no error there: the
backward may take the missing sum. That is checked when it runs, and reported with the line of the
forward. torch.func transforms wrap it in a Function of their own at each level.

Under global strictness no observer follows such code: that the gradients are those of one device is
what it promises, and numbers try.
"""

import sys
from collections.abc import Sequence
from functools import partial
from itertools import zip_longest
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.ir.own_functions import (
    applied,
    has_saving_hooks,
    is_own,
    name_of_hook,
    own_nodes,
)
from shardmap_torch.checker.ir.program import Equation, Promise, StorageType, Use, use_of
from shardmap_torch.checker.ir.repairs import rejected
from shardmap_torch.checker.rules.infer import Types, tensors_of
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.core.functorch import base_of, levels
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.source_location import is_own as is_of_library
from shardmap_torch.core.torch_private.engine import DisableTorchFunction, FakeTensor
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import I, K, Partial, R, V, Z

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


def meet(interpreter: "Interpreter", function: Any, operands: Sequence[Any]) -> None:
    """Notes that a Function of the user's own is applied, and what its backward promises."""
    own = applied(function)  # torch.func wraps it in another one
    if own is None or not is_own(own) or interpreter.is_paused:
        return
    interpreter.observer.on_function(own.__name__)
    tensors = [x for value in operands for x in tensors_of(value)]
    if any(map(interpreter.flows_through, tensors)):
        promise(interpreter, f"the backward of {own.__name__}")


def meet_hooks(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    """Calls what registers a hook, or gives a node for hooks, and notes what these promise."""
    reader = sys._getframe(3)  # this, and two functions of the mode
    if not is_of_library(reader):
        name = name_of_hook(func)
        interpreter.observer.on_function(name)
        promise(interpreter, f"hooks by {name}")
    return func(*args, **kwargs)


def meet_saving_hooks(interpreter: "Interpreter") -> None:
    """Notes what the user's hooks promise that may change what autograd saves of an operation."""
    if has_saving_hooks(of_users=True):
        promise(interpreter, "hooks by saved_tensors_hooks")


def promise(interpreter: "Interpreter", what: str) -> None:
    """Notes that gradients are one device's, over all axes; regions promise it of theirs."""
    if not (interpreter.in_region or interpreter.is_paused):
        made = Promise(what, frozenset(interpreter.axes), call_site(), False)
        interpreter.traits.promises |= {made}


def watch(interpreter: "Interpreter", outputs: Sequence[Any]) -> None:
    """Registers hooks that check the user's own Functions in a backward from `outputs`."""
    for node, name in own_nodes(outputs):
        if node not in interpreter.watched:
            interpreter.watched.add(node)
            node.register_prehook(partial(_enter, interpreter, node))
            node.register_hook(partial(_check, interpreter, node, name))


def uncommitted(
    interpreter: "Interpreter", function: type[Function], args: Sequence[Any], out: Any
) -> Any:
    """Leaves open how ranks use results of a Function of the user's own that are as its operands.

    What is made of one computation that all ranks repeat may be used by each in its own way if the
    backward sums the gradients, as a copy into a parallel region does; `_check` looks whether it
    has. A sum taken in the forward stays one computation, whose backward sums nothing.
    """
    if not function.__module__.startswith(_COMPILED):
        interpreter.traits.applies_functions = True
    meet(interpreter, function, args)
    if not is_own(function) or interpreter.is_paused:
        return out
    read = [interpreter.storage_type(x).types for x in args if isinstance(x, FakeTensor)]
    open_axes = [at for at in range(len(interpreter.axes)) if all(t[at] in _ONE for t in read)]
    # Inside of a forward, where grad mode is off, results do not say that they will.
    is_tracked = any(isinstance(x, FakeTensor) and x.requires_grad for x in args)

    def reopened(value: Any) -> Any:
        is_new = isinstance(value, FakeTensor) and not any(value is x for x in args)
        if not (is_new and (value.requires_grad or is_tracked)):
            return value
        return interpreter.retyped(
            value, lambda at, have: K if at in open_axes and have == I else have
        )

    made = tuple(map(reopened, out)) if isinstance(out, tuple) else (reopened(out),)
    for value in made:
        if isinstance(value, Tensor):
            _link(interpreter, value, open_axes)
    return made if isinstance(out, tuple) else made[0]


def _link(interpreter: "Interpreter", result: Tensor, open_axes: Sequence[int]) -> None:
    """Notes the types that a result has at the end of a Function, for the node it comes from.

    Over axes on which an operand varies, and the result does not, ranks have met in the forward.
    """
    with DisableTorchFunction():
        nodes = [(each.grad_fn, each.output_nr) for each in levels(result)]
    use = use_of("", base_of(result), interpreter.storage_type(result))
    met = frozenset(at for at, have in enumerate(use.types) if have == K and at not in open_axes)
    for node, number in nodes:
        if node is not None:
            interpreter.results_of[node._sequence_nr(), number] = use, met


def _enter(
    interpreter: "Interpreter", node: Node, gradients: Sequence[Tensor | None]
) -> tuple[Tensor | None, ...]:
    """Types cotangents of results in which ranks have met, and which each uses, as pending sums.

    So that a backward which takes no sum is refused.
    """

    def as_sum(number: int, gradient: Tensor | None) -> Tensor | None:
        _, met = interpreter.results_of.get((node._sequence_nr(), number), (None, ()))
        if gradient is None or not met:
            return gradient
        return interpreter.retyped(
            gradient, lambda at, have: Partial if at in met and plain(have) == V else have
        )

    return tuple(as_sum(number, gradient) for number, gradient in enumerate(gradients))


_COMPILED: Final = ("torch.", "shardmap_torch.collectives.", "shardmap_torch.checkpoint")
"""Modules of Functions that batched bodies have compiled, in forms of their own, or not at all."""

_ONE: Final = (I, K, Z)
"""Types of operands of one computation that all ranks repeat."""


def _check(
    interpreter: "Interpreter",
    node: Node,
    name: str,
    gradients: Sequence[Any],
    seeds: Sequence[Any],
) -> tuple[Any, ...]:
    duals = [interpreter.storage_type(base_of(seed)).types for seed in seeds if seed is not None]
    operands = [_operand(interpreter, *edge) for edge in node.next_functions]
    gradients = tuple(
        _as_addend(interpreter, _as_own(interpreter, gradient, duals), operand)
        for gradient, operand in zip_longest(gradients, operands[: len(gradients)])
    )
    for gradient, operand in zip(gradients, operands, strict=False):
        if gradient is None or operand is None or operand.shape != tuple(gradient.shape):
            continue
        storage_type = interpreter.storage_type(base_of(gradient))
        for at, pair in enumerate(zip(operand.types, storage_type.types, strict=True)):
            if pair[0] == I and pair[1].varies:
                raise _wrong(interpreter, node, name, at, operand, storage_type)
    return gradients


def _as_addend(interpreter: "Interpreter", gradient: Any, operand: Use | None) -> Any:
    """Types a gradient of addends that is equal on all ranks as R: each addend has that gradient.

    For example, a sum's backward may return the sum's cotangent unchanged: I there, R of an addend.
    """
    if gradient is None or operand is None:
        return gradient
    of = operand.types
    return interpreter.retyped(
        gradient, lambda at, have: R if have == I and of[at].varies else have
    )


def _as_own(interpreter: "Interpreter", gradient: Any, cotangents: Sequence[Types]) -> Any:
    """Types a gradient that does not depend on the cotangents, such as a constant, as V.

    If the results are equal on all ranks, the operand was used in one computation, and the gradient
    stays. Otherwise each rank has used it for its own results, and all their gradients, also equal
    ones, have to be summed.
    """
    if gradient is None or interpreter.goes_on([gradient]):
        return gradient
    own = {
        at for seed in cotangents for at, have in enumerate(seed) if plain(have) in (V, R, Partial)
    }
    return interpreter.retyped(
        gradient, lambda at, have: V if at in own and have in (I, R, K) else have
    )


def _operand(interpreter: "Interpreter", producer: Node | None, number: int) -> Use | None:
    """Returns the operand with its types at that time: an input, or its producer's result."""
    variable = getattr(producer, "variable", None)
    if isinstance(variable, Tensor):
        return use_of("", variable, interpreter.storage_type(variable))
    if producer is None:
        return None
    source: Equation | None = interpreter.equation_of(producer)
    results = () if source is None else source.results
    made = results[number] if number < len(results) else None
    return interpreter.results_of.get((producer._sequence_nr(), number), (made, ()))[0]


def _wrong(
    interpreter: "Interpreter",
    node: Node,
    name: str,
    at: int,
    operand: Use,
    storage_type: StorageType,
) -> ShardTypeError:
    axis, have, applied = (
        interpreter.axes[at],
        storage_type.types[at],
        interpreter.equation_of(node),
    )
    site = applied.site if applied is not None else None
    return rejected(
        f"{interpreter.name}: over {axis!r}, an operand of {name} is I and its backward gives it a "
        f"gradient that is {have}: {messages.wrong(I, have)}.\n"
        f"  at {site}\n"
        f"  the operand is {operand}, from {operand.storage_type.origin()}\n"
        f"  the gradient is from {storage_type.origin()}\n"
        f"Fix: give it the operand as R, with convert(x, {axis!r}, src=I, dst=R), or sum the "
        "gradient in the backward of a shardmap_torch.Function.",
        proposals=messages.repairs_to(interpreter, operand.storage_type, at, R),
    )

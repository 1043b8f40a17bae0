"""The user's own code that autograd runs: Functions with a backward of their own, and hooks.

Grad mode is off in the forward of an `autograd.Function`, so mixing I and V is no error there: the
backward may take the missing sum. That is checked when it runs, and reported with the line of the
forward. torch.func transforms wrap it in a Function of their own at each level.

Under global strictness observers compare such code with one device like the body. They need the
values whose gradients it gets and returns; autograd's nodes do not refer to them, so the
interpreter keeps the arguments of torch functions by node, from the first such Function on.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, Final

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.cotangents import Giver, settled, uses_of
from shardmap_torch.checker.ir.own_functions import (
    GRAD_FN,
    applied,
    backward_of,
    has_saving_hooks,
    is_own,
    name_of_hook,
    name_of_own,
    own_nodes,
)
from shardmap_torch.checker.ir.program import Equation, Use, use_of
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.core.autograd_state import NONE as NO_BACKWARD
from shardmap_torch.core.autograd_state import graph_nodes, running_backward
from shardmap_torch.core.functorch import base_of, levels
from shardmap_torch.core.source_location import definition_of
from shardmap_torch.core.source_location import is_own as is_of_library
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    current_autograd_node,
)
from shardmap_torch.types import I, K, Partial, V, Z

if TYPE_CHECKING:  # for annotations; it takes a second to import
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


def is_observed(interpreter: "Interpreter") -> bool:
    """Returns whether an observer compares the program here."""
    return interpreter.observer.compares and not interpreter.is_paused


def meet(interpreter: "Interpreter", function: Any, operands: Sequence[Any]) -> None:
    """Begins to keep values where a Function of the user's own is applied, with its operands.

    Raises:
        ShardTypeError: it is applied in a recomputation, whose graph nothing watches.
    """
    own = applied(function)  # torch.func wraps it in another one
    if own is not None and is_own(own):
        node = None if running_backward() == NO_BACKWARD else current_autograd_node()
        if node is not None and node not in interpreter.watched:
            _reject_inner(interpreter, node, own.__name__)
        if not interpreter.is_paused:
            interpreter.observer.on_function(own.__name__)
    if is_own(function):
        interpreter.keeps_values = True
        with DisableTorchFunction():
            remember(interpreter, operands)


def remember(interpreter: "Interpreter", values: Iterable[Any]) -> None:
    """Keeps the tensors among arguments by the node whose backward gets their gradients."""
    for value in values if is_observed(interpreter) else ():
        if isinstance(value, Tensor | list | tuple):
            for tensor in tensors_of(value):
                *_, base = found = [*levels(tensor)]
                nodes = [(x.grad_fn, x.output_nr) for x in found]
                interpreter.values.update({(n, at): base for n, at in nodes if n is not None})


def _value(interpreter: "Interpreter", node: Node | None, number: int) -> Tensor | None:
    variable = getattr(node, "variable", None)
    if isinstance(variable, Tensor):
        return base_of(variable)
    return None if node is None else interpreter.values.get((node, number))


def _bases(tensors: Sequence[Tensor | None]) -> list[Tensor | None]:
    return [None if tensor is None else base_of(tensor) for tensor in tensors]


def _is_compared(interpreter: "Interpreter", node: Node) -> bool:
    number = node._sequence_nr()
    inside = any(number in region for region in interpreter.regions)
    return is_observed(interpreter) and not inside


def reject_unseen(interpreter: "Interpreter") -> None:
    """Refuses steps of a custom backward whose start was not reported, as in a recomputation."""
    if not interpreter.observer.compares:
        return
    node = current_autograd_node()
    # The start of a watched node is reported; steps after its end are autograd's sums.
    if node is None or node in interpreter.watched:
        return
    name = name_of_own(node)
    if name is not None:
        _reject_inner(interpreter, node, name)


def _reject_inner(interpreter: "Interpreter", node: Node, name: str) -> None:
    if _is_compared(interpreter, node):
        raise messages.error(
            interpreter,
            f"check='global': the backward of {name} runs inside of another backward, where it is "
            "not compared with one device.",
            [],
            "wrap what calls it in local_region(f, in_types, out_types).",
        )


def follow_hooks(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    """Calls what registers a hook, or gives a node for hooks; gradients that these give are typed.

    Raises:
        ShardTypeError: under global strictness, which compares the whole body by numbers.
    """
    node, reader = current_autograd_node(), sys._getframe(4)  # this, and three of the mode
    is_compared = is_observed(interpreter) if node is None else _is_compared(interpreter, node)
    is_compared &= not is_of_library(reader)
    is_followed = func is Tensor.register_hook and node is None
    if is_compared and not is_followed:
        refuse_uncompared(interpreter, name_of_hook(func))
    if is_compared and is_followed:
        interpreter.observer.on_function(_HOOKED)
    interpreter.asks_nodes |= func == GRAD_FN and not is_of_library(reader)
    if func is Tensor.register_hook and not interpreter.is_paused:
        given = {**dict(zip(("self", "hook"), args, strict=False)), **kwargs}
        interpreter.has_hooks = True
        value: Any = given["self"]
        return value.register_hook(_seen(interpreter, value, given["hook"], is_compared))
    return func(*args, **kwargs)


def _seen(
    interpreter: "Interpreter",
    value: Tensor,
    hook: Callable[[Tensor], Tensor | None],
    is_compared: bool,
) -> Callable[[Tensor], Tensor]:
    """Returns a hook whose functions of torch are seen, and whose gradient is typed as the value's.

    It gives a tensor in any case: one that the hook has written to is another one for the others.
    Where it is compared, it is as a backward of the user's own is.
    """
    operand = use_of("", base_of(value), interpreter.storage_type(value))
    site, number = definition_of(hook), len(interpreter.hooked)
    interpreter.hooked.append(base_of(value))  # not in the hook, which the value has in turn

    @wraps(hook)
    def seen(gradient: Tensor) -> Tensor:
        lent = _lent(interpreter, gradient)
        if is_compared:
            values = [interpreter.hooked[number]]
            interpreter.observer.on_backward_start(_HOOKED, values, [base_of(lent)])
        with interpreter.seeing():
            found = hook(lent)
        found = lent if found is None else found
        interpreter.copies.reject_stale(interpreter, [found], site)
        giver = Giver("a value", "a hook on it", site, uses_of(interpreter, [lent]))
        found = settled(interpreter, operand, found, giver)
        if is_compared:
            interpreter.observer.on_backward_end(_HOOKED, values, [base_of(found)])
        return found

    return seen


_HOOKED: Final = "register_hook"


def refuse_saving_hooks(interpreter: "Interpreter") -> None:
    """Refuses, as `refuse_hooks`, an operation whose saved tensors the user's hooks may change.

    Autograd's own steps are not compared: they are the derivative of a forward that is.
    """
    if has_saving_hooks(of_users=True):
        refuse_uncompared(interpreter, "saved_tensors_hooks")


def refuse_uncompared(interpreter: "Interpreter", what: str) -> None:
    """Refuses what may be another step on one device than those that are compared."""
    if is_observed(interpreter):
        raise messages.error(
            interpreter,
            f"check='global': {what} is used, and what it changes is not compared with one device.",
            [],
            "write the step as a shardmap_torch.Function, or wrap the code in local_region(f, "
            "in_types, out_types).",
        )


def watch(interpreter: "Interpreter", outputs: Sequence[Any]) -> None:
    """Registers hooks that check the user's own code in a backward from `outputs`.

    That is in Functions, and in hooks on any node, if the body has had one.
    """
    own: dict[Any, str] = dict(own_nodes(outputs))
    roots = [x.grad_fn for x in outputs if isinstance(x, Tensor)] if interpreter.asks_nodes else ()
    for node in dict.fromkeys([*own, *graph_nodes(roots)]):
        if node in interpreter.watched:
            continue
        interpreter.watched.add(node)
        if node in own:
            node.register_prehook(partial(_enter, interpreter, node, own[node]))
            node.register_hook(partial(_check, interpreter, node, own[node]))
        else:
            node.register_prehook(partial(_settle_results, interpreter, node))
            node.register_hook(partial(_settle_operands, interpreter, node))


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


def _lent(interpreter: "Interpreter", gradient: Tensor) -> Tensor:
    """Returns a gradient for code that may write into it; see `Copies.lend`."""
    lent = interpreter.copies.lend(interpreter, gradient)
    if lent is not gradient:
        _link(interpreter, lent, range(len(interpreter.axes)))
    return lent


def _enter(
    interpreter: "Interpreter", node: Node, name: str, gradients: Sequence[Tensor | None]
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

    typed = [as_sum(number, gradient) for number, gradient in enumerate(gradients)]
    if interpreter.asks_nodes:
        typed = [*_settle_results(interpreter, node, typed)]
    lent = tuple([x if x is None else _lent(interpreter, x) for x in typed])
    if _is_compared(interpreter, node):
        values = [_value(interpreter, node, number) for number in range(len(lent))]
        interpreter.observer.on_backward_start(name, values, _bases(lent))
    own = interpreter.own[node] = ExitStack()
    own.enter_context(interpreter.seeing())
    return lent


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
    interpreter.own.pop(node).close()
    gradients = _handed_on(interpreter, node, name, gradients, seeds)
    if _is_compared(interpreter, node):
        pairs = zip(gradients, node.next_functions, strict=False)
        returned = [(g, _value(interpreter, *edge)) for g, edge in pairs if edge[0] is not None]
        values, given = [value for _, value in returned], _bases([g for g, _ in returned])
        interpreter.observer.on_backward_end(name, values, given)
    return gradients


def _handed_on(
    interpreter: "Interpreter",
    node: Node,
    name: str,
    gradients: Sequence[Any],
    seeds: Sequence[Any],
) -> tuple[Any, ...]:
    """Types the gradients that the user's own backward has returned as those of its operands."""
    site = definition_of(backward_of(node))
    returned = [gradient for gradient in gradients if gradient is not None]
    interpreter.copies.reject_stale(interpreter, returned, site)
    uses = uses_of(interpreter, seeds)
    giver = Giver(f"an operand of {name}", "its backward", site, uses)
    return _settled(interpreter, gradients, node.next_functions, giver)


def _settled(
    interpreter: "Interpreter",
    gradients: Sequence[Any],
    edges: Sequence[tuple[Node | None, int]],
    giver: Giver,
) -> tuple[Any, ...]:
    found = [*gradients]
    for at, (gradient, edge) in enumerate(zip(gradients, edges, strict=False)):
        operand = None if gradient is None else _operand(interpreter, *edge)
        if operand is not None and operand.shape == tuple(gradient.shape):
            found[at] = settled(interpreter, operand, gradient, giver)
    return tuple(found)


_HOOK: Final = Giver("a value", "a hook on a node")


def _settle_results(
    interpreter: "Interpreter", node: Node, gradients: Sequence[Any]
) -> tuple[Any, ...]:
    """Types what hooks have made of the gradients of a node's results."""
    edges = [(node, number) for number in range(len(gradients))]
    return _settled(interpreter, gradients, edges, _HOOK)


def _settle_operands(
    interpreter: "Interpreter", node: Node, gradients: Sequence[Any], seeds: Sequence[Any]
) -> tuple[Any, ...]:
    """Types what hooks have made of the gradients of a node's operands."""
    return _settled(interpreter, gradients, node.next_functions, _HOOK)


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

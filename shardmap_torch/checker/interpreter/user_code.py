"""Reports the user's own code that autograd runs, custom backwards and hooks, to the observer.

Under global strictness observers compare it with one device like the body. They need the values
whose gradients such code gets and returns; autograd's nodes do not refer to them, so the
interpreter keeps the arguments of torch functions by node, from the first such Function on.
"""

import sys
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.state import kept
from shardmap_torch.checker.ir import own_functions
from shardmap_torch.checker.ir.observer import UNOBSERVED
from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import call_site, is_own
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    current_autograd_node,
    functorch,
)

if TYPE_CHECKING:  # for annotations; the interpreter calls this module
    from shardmap_torch.checker.interpreter.interpreter import Interpreter


def is_observed(interpreter: "Interpreter") -> bool:
    """Returns whether an observer compares the program here."""
    return interpreter.observer is not UNOBSERVED and not interpreter.is_paused


def meet(interpreter: "Interpreter", function: Any, operands: Sequence[Any]) -> None:
    """Begins to keep values where a Function of the user's own is applied, with its operands."""
    if own_functions.is_own(function):
        interpreter.keeps_values = True
        with DisableTorchFunction():
            remember(interpreter, operands)


def remember(interpreter: "Interpreter", values: Iterable[Any]) -> None:
    """Keeps the tensors among arguments by the node whose backward gets their gradients."""
    for value in values if is_observed(interpreter) else ():
        if isinstance(value, Tensor | list | tuple):
            for tensor in tensors_of(value):
                level, found = tensor, []
                while True:
                    node = level.grad_fn
                    if node is not None:
                        found.append((node, level.output_nr))
                    if not functorch.is_functorch_wrapped_tensor(level):
                        break
                    level = functorch.get_unwrapped(level)
                interpreter.values.update(dict.fromkeys(found, level))


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


def enter_backward(
    interpreter: "Interpreter", node: Node, name: str, gradients: Sequence[Tensor | None]
) -> None:
    """Reports to the observer that a custom backward begins, with these gradients."""
    if _is_compared(interpreter, node):
        values = [_value(interpreter, node, number) for number in range(len(gradients))]
        interpreter.observer.on_backward_start(name, values, _bases(gradients))


def leave_backward(
    interpreter: "Interpreter", node: Node, name: str, gradients: Sequence[Tensor | None]
) -> None:
    """Reports to the observer that a custom backward has ended, with these gradients."""
    if _is_compared(interpreter, node):
        pairs = zip(gradients, node.next_functions, strict=False)
        typed = [(g, _value(interpreter, *edge)) for g, edge in pairs if edge[0] is not None]
        interpreter.observer.on_backward_end(
            name, [value for _, value in typed], _bases([g for g, _ in typed])
        )


def reject_unseen(interpreter: "Interpreter", name_of: Callable[[Node | None], str | None]) -> None:
    """Refuses steps of a custom backward whose start was not reported, as in a recomputation."""
    node = current_autograd_node()
    # The start of a watched node is reported; steps after its end are autograd's sums.
    if node is None or node in interpreter.watched:
        return
    name = name_of(node)
    if name is not None and _is_compared(interpreter, node):
        raise messages.error(
            interpreter,
            f"check='global': the backward of {name} runs inside of another backward, where it is "
            "not compared with one device.",
            [],
            "wrap what calls it in local_region(f, in_types, out_types).",
        )


# -------------------------------------------------------------------------------------- hooks


def register_hook(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    """Registers a hook, on a gradient or on `.grad`, that reports when it begins and ends."""
    tensor, hook = list(args) + list(kwargs.values())
    node = current_autograd_node()
    if not (is_observed(interpreter) if node is None else _is_compared(interpreter, node)):
        return func(tensor, hook)
    if node is not None:
        raise messages.error(
            interpreter,
            "check='global': a hook is registered in what a backward computes again, as of a "
            "checkpoint, where it is not compared with one device.",
            [],
            "register it outside, or wrap what does so in local_region(f, in_types, out_types).",
        )
    number = len(interpreter.hooked)
    interpreter.hooked.append(base_of(tensor))

    def watched(given: Tensor) -> Any:
        if number >= len(interpreter.hooked):
            raise kept(f"{interpreter.name}: at {call_site()} a backward runs a hook on")
        value = interpreter.hooked[number]
        observer, field = interpreter.observer, func == Tensor.register_post_accumulate_grad_hook
        found = _field(given) if field else base_of(given)
        observer.on_backward_start("a hook", [value], [found])
        out = hook(given)
        found = _field(given) if field else base_of(given if out is None else out)
        observer.on_backward_end("a hook", [value], [found])
        return out

    return func(tensor, watched)


def _field(leaf: Tensor) -> Tensor | None:
    with DisableTorchFunction():
        return leaf.grad


def read_node(interpreter: "Interpreter", func: Any, args: Any, kwargs: Any) -> Any:
    """Refuses to read the node of a tensor, whose hooks cannot be observed."""
    reader = sys._getframe(3)  # this, and two functions of the mode
    if is_observed(interpreter) and interpreter.observer.judges and not is_own(reader):
        raise messages.error(
            interpreter,
            "check='global': .grad_fn is read, and hooks of nodes and modules are not compared "
            "with one device.",
            [],
            "use Tensor.register_hook, or wrap the code in local_region(f, in_types, out_types).",
        )
    return func(*args, **kwargs)

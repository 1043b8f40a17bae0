"""Gradients on one device that are assumed: a backward that autograd derives is not interpreted.

Its steps are not compared, so that all that the comparison reads of it is which values have a
gradient; that each has its value's metadata, and a pending sum where all ranks use its value, is
likely. A program that is refused with such gradients is compared again without them.
"""

from collections.abc import Sequence

from torch import Tensor
from torch.autograd.graph import Node

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.fake_results import empty
from shardmap_torch.checker.ir.own_functions import applied
from shardmap_torch.checker.rules.lattice import plain
from shardmap_torch.collectives.autograd import FunctorchForm, GradientForm
from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import (
    forward_level,
    temporarily_clear_interpreter_stack,
)
from shardmap_torch.types import COTANGENT, Partial


def assume(
    interpreter: Interpreter, outputs: Sequence[Tensor], inputs: Sequence[Tensor]
) -> tuple[Tensor | None, ...] | None:
    """Makes gradients of the inputs; None where code or derivatives may depend on the backward."""
    nodes = [*graph_nodes(x.grad_fn for x in outputs)]
    is_derived = not interpreter.has_hooks and all(map(_is_derived, nodes))
    if not _is_outermost(interpreter, outputs) or not is_derived:
        return None
    reached = {id(getattr(node, "variable", None)) for node in nodes}
    with temporarily_clear_interpreter_stack():
        return tuple([_like(interpreter, x) if id(x) in reached else None for x in inputs])


def _is_outermost(interpreter: Interpreter, outputs: Sequence[Tensor]) -> bool:
    """Returns whether the first transform of the body takes its gradient, and nothing else does."""
    is_first = interpreter.ending_levels == {1} and forward_level() < 0
    flows = any(base_of(x).requires_grad for x in outputs)
    return is_first and not flows


def _is_derived(node: Node) -> bool:
    """Returns whether the backward of a node is torch's own, or a collective's."""
    function = getattr(node, "_forward_cls", None)
    return function is None or applied(function) in (FunctorchForm, GradientForm)


def _like(interpreter: Interpreter, x: Tensor) -> Tensor:
    """Makes a gradient of the type that it has where ranks use what is equal in their own ways."""
    made = empty(interpreter.fake, tuple(x.shape), x.dtype, x.device)
    types = interpreter.storage_type(x).types
    duals = tuple([COTANGENT.get(plain(own), Partial) for own in types])
    interpreter.bring(made, duals, "a gradient")
    return made

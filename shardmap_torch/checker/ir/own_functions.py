"""Functions of the user's own among the nodes of autograd's graph."""

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import Tensor
from torch.autograd import Function
from torch.autograd.graph import Node

from shardmap_torch.core.autograd_state import graph_nodes
from shardmap_torch.core.torch_private.engine import CtxWithSavedTensors
from shardmap_torch.errors import CollectiveError
from shardmap_torch.function import Function as KeepingFunction


def is_own(function: type[Function]) -> bool:
    """Returns whether a Function is the user's, whose backward is no derivative of its forward."""
    return not function.__module__.startswith(_NOT_OWN)


def own_nodes(outputs: Sequence[Any]) -> Iterator[tuple[Node, str]]:
    """Yields the autograd nodes of the user's own Functions, with their names."""
    for node in graph_nodes(x.grad_fn for x in outputs if isinstance(x, Tensor)):
        name = name_of_own(node)
        if name is not None:
            yield node, name


def name_of_own(node: Node | None) -> str | None:
    """Returns the name of the user's own Function whose backward a node is, or None."""
    function = _own(node)
    return None if function is None else function.__name__


def _own(node: object) -> type[Function] | None:
    function = applied(getattr(node, "_forward_cls", None))
    return function if function is not None and is_own(function) else None


def communicating(error: CollectiveError) -> type[Function] | None:
    """Returns the plain Function for want of whose scope a backward has failed, if it is one."""
    function = _own(error.node)
    is_plain = function is not None and not issubclass(function, KeepingFunction)
    return function if is_plain else None


def rejects_transforms(node: Node | None) -> bool:
    """Returns whether a node is of the user's own Function, in the form that torch.func refuses."""
    function = _own(node)
    return function is not None and function.setup_context is Function.setup_context


_NOT_OWN: Final = ("shardmap_torch.", "torch.utils.checkpoint")
"""Modules of Functions whose backward is the derivative of what they call."""


def applied(function: type[Function] | None) -> type[Function] | None:
    """Returns the Function, or the one that a transform's Function wraps."""
    if function is None or function.__module__ != CtxWithSavedTensors.__module__:
        return function
    cells = getattr(function.backward, "__closure__", None) or ()
    found = (cell.cell_contents for cell in cells)
    return next((f for f in found if isinstance(f, type) and issubclass(f, Function)), None)

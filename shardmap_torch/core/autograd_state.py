"""Autograd's state: its graphs, the backward that runs, and the hooks for tensors that are saved.

torch.utils.checkpoint calls what it recomputes in a backward, or under such hooks. Neither is a
matter of the body that is checked.
"""

import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch
from torch.autograd.graph import Node

from shardmap_torch.core.torch_private.engine import (
    current_graph_task_id,
    pop_saved_tensors_hooks,
    push_saved_tensors_hooks,
    top_saved_tensors_hooks,
)

NONE: Final = -1
RECORDING: Final = 2


def grad_mode() -> int:
    """Returns `RECORDING` where gradients are recorded, less where not, 0 in inference mode."""
    return RECORDING if torch.is_grad_enabled() else int(not torch.is_inference_mode_enabled())


def graph_nodes(roots: Iterable[Node | None], stop: Iterable[Node | None] = ()) -> Iterator[Node]:
    """Yields the nodes that a backward from these would come to, each once.

    Not those of `stop`, nor what is behind them only.

    Example:
        >>> import torch
        >>> x = torch.ones(1, requires_grad=True)
        >>> [node.name() for node in graph_nodes([(2 * x).exp().grad_fn])]
        ['ExpBackward0', 'MulBackward0', 'torch::autograd::AccumulateGrad']
    """
    seen: set[Node | None] = {None, *stop}
    pending = [*roots]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        pending += [parent for parent, _ in node.next_functions]


class _Around(threading.local):
    task = NONE


_AROUND: Final = _Around()


def running_backward() -> int:
    """Returns the number of the backward that runs, or `NONE`, apart from one `set_aside`."""
    task: int = current_graph_task_id()
    return NONE if task == _AROUND.task else task


@contextmanager
def set_aside() -> Iterator[None]:
    """Sets aside the backward that runs and all hooks for saved tensors, for the context.

    Example:
        >>> import torch
        >>> double = lambda x: 2 * x
        >>> x = torch.ones(1, requires_grad=True)
        >>> with torch.autograd.graph.saved_tensors_hooks(double, double):
        ...     y = x * x
        ...     with set_aside():
        ...         z = x * x
        >>> torch.autograd.grad(y, x), torch.autograd.grad(z, x)
        ((tensor([8.]),), (tensor([2.]),))
    """
    before, _AROUND.task = _AROUND.task, current_graph_task_id()
    hooks = []
    while (top := top_saved_tensors_hooks(True)) is not None:
        hooks.append(top)
        pop_saved_tensors_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(hooks):
            push_saved_tensors_hooks(pack, unpack)
        _AROUND.task = before

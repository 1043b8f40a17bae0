"""The scope of a body: its mesh, its bound axes, and the monitor of its run.

It is the only ambient state inside a body: a stack in a `threading.local` (Dynamo cannot
trace `ContextVar.get`), which operations read once, in their forward.
"""

import threading
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

from torch import Tensor

from shardmap_torch.collectives.protocol import (
    Backend,
    Drawing,
    Monitor,
    Redraws,
    Reruns,
    is_checker,
)
from shardmap_torch.core.ambient import SCOPES
from shardmap_torch.core.torch_private.engine import current_autograd_node, current_graph_task_id
from shardmap_torch.errors import CollectiveError
from shardmap_torch.types import AxisType, I, V

_UNCHECKED: Final = (I, V)


@dataclass(eq=False)  # not frozen: that would add a microsecond to each call
class Scope:
    """The context in which a body runs; immutable after construction.

    Attributes:
        backend: runs its collectives.
        axes: bound in it.
        monitor: compares it with the checked program; None if it is not checked.
        drawing: seeds its random draws; None if it draws nothing, or is not checked.
        reruns: has the monitors of its runs in a backward, on a scope that `fork` returned.
        redraws: has their drawings.
    """

    backend: Backend
    axes: frozenset[str]
    monitor: Monitor | None = None
    drawing: Drawing | None = None
    reruns: Reruns | None = None
    redraws: Redraws | None = None

    def on_operation(self, what: object, x: Tensor | None = None) -> None:
        """Reports an operation to the monitor, if there is one."""
        if self.monitor is not None:
            self.monitor.on_operation(what, x)

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...] | None:
        """Returns the types of `x` along `axes` that the checker found; None without a checker."""
        return None if self.monitor is None else self.monitor.types_of(axes, x)

    def read(self, x: Tensor) -> tuple[AxisType, AxisType]:
        """The reading of a cast to V, as the checker found it: see `Readings`."""
        if self.monitor is None:
            return _UNCHECKED
        note = self.monitor.note("reading")
        if is_checker(self.backend):
            note.types = self.backend.read(x)
        uncommitted, copies = note.types or _UNCHECKED
        return uncommitted, copies

    def is_cast(self) -> bool:
        """Returns whether ranks use this equal result each in its own way; see `Readings`."""
        if self.monitor is None:
            return False
        note = self.monitor.note("result")
        if is_checker(self.backend):
            note.value = self.backend.is_cast()
        return note.value

    def reduction(self, op: str, axes: Sequence[str], x: object) -> tuple[str, int]:
        own = op, self.backend.mesh.num_ranks(axes)
        return self.backend.reduction(op, axes, x) if is_checker(self.backend) else own

    def fork(self, what: object) -> "Scope":
        """Returns the scope to keep for code that a backward will run again; see `Monitor.fork`."""
        if self.monitor is None:
            return self
        redraws = None if self.drawing is None else self.drawing.fork()
        reruns = self.monitor.fork(what)
        return Scope(self.backend, self.axes, self.monitor, self.drawing, reruns, redraws)

    def rerun(self, key: Hashable) -> "Scope":
        """Returns the scope of one such run, on a scope that `fork` returned."""
        if self.reruns is None:
            return self
        drawing = None if self.redraws is None else self.redraws(key)
        return Scope(self.backend, self.axes, self.reruns(key), drawing)

    def end(self) -> None:
        """Ends a run that `rerun` began."""
        if self.monitor is not None:
            self.monitor.end()


def current_scope() -> Scope | None:
    """Returns the scope of the innermost body that runs on this thread, or None."""
    scope: Scope | None = SCOPES.stack[-1] if SCOPES.stack else None
    return scope


class enter_scope:  # noqa: N801 - used as a function; a generator would cost each call 1 us
    """Makes `scope` the current one on this thread; None is the scope outside of any body."""

    def __init__(self, scope: Scope | None) -> None:
        self._scope = scope

    def __enter__(self) -> None:
        """Makes the scope current, and starts its drawing."""
        scope = self._scope
        SCOPES.stack.append(scope)
        if scope is not None and scope.drawing is not None:
            scope.drawing.enter(scope.monitor)

    def __exit__(self, *error: object) -> None:
        """Restores the scope before, also after an error."""
        SCOPES.stack.pop()
        if self._scope is not None and self._scope.drawing is not None:
            self._scope.drawing.leave()


@contextmanager
def backward_in(scope: Scope) -> Iterator[None]:
    """Runs backwards that begin in the context with a scope, for groups of torch.distributed."""
    before, SCOPES.backward = SCOPES.backward, scope
    try:
        yield
    finally:
        SCOPES.backward = before


@contextmanager
def outside() -> Iterator[None]:
    """Runs the context as code outside of bodies and their backwards."""
    before, SCOPES.backward = SCOPES.backward, None
    try:
        with enter_scope(None):
            yield
    finally:
        SCOPES.backward = before


def scope_of(name: str, axes: Sequence[str]) -> Scope:
    """Returns the current scope, after checking that `axes` may be used in it.

    Raises:
        CollectiveError: outside a body, or an axis is unknown, unbound or named twice.
    """
    scope = current_scope()
    if scope is not None and len(axes) == 1 and axes[0] in scope.axes:
        return scope
    if scope is None and current_graph_task_id() != -1:
        error = CollectiveError(
            f"{name} was called in a backward pass that does not know the mesh of the body. Derive "
            "the autograd.Function whose backward calls it from shardmap_torch.Function, which "
            "keeps the mesh for its backward."
        )
        error.node = current_autograd_node()
        raise error
    if scope is None and threading.current_thread() is not threading.main_thread():
        thread = threading.current_thread().name
        raise CollectiveError(
            f"{name} was called on the thread {thread!r}, on which no body of a shard_mapped "
            "function runs. Collectives belong on the thread that runs the body: a thread that a "
            "body starts would meet the other ranks in an order that nobody knows."
        )
    if scope is None:
        raise CollectiveError(
            f"{name} was called outside shard_map, where no mesh axis is bound. "
            "Call it in the body of a shard_mapped function."
        )
    if not (scope.axes.issuperset(axes) and len(set(axes)) == len(axes) and axes):
        raise CollectiveError(_explain_axes(name, tuple(axes), scope))
    return scope


def _explain_axes(name: str, axes: tuple[str, ...], scope: Scope) -> str:
    mesh, bound = scope.backend.mesh, ", ".join(map(repr, sorted(scope.axes)))
    unknown = [axis for axis in axes if axis not in mesh.axis_names]
    if unknown:
        here = f"no axis {', '.join(map(repr, unknown))} in the {mesh}"
        return f"{name}: {here}.\nFix: name one of the axes that the body has, {bound}."
    unbound = [axis for axis in axes if axis not in scope.axes]
    if unbound:
        return (
            f"{name}: axis {', '.join(map(repr, unbound))} is not bound here; the body is mapped "
            f"over {bound}. Values are global over the other axes; bind more with axis_names=."
        )
    return f"{name}: axes {axes} must be at least one name, each once."

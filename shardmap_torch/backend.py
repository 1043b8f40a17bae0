"""The seam between operations and the meshes that run them, and the scope of a body.

The scope is the one piece of ambient state inside a body. It is a stack in a `threading.local`
(Dynamo cannot trace `ContextVar.get`), and operations read it once, in their forward.
"""

import threading
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

import torch
from torch import Tensor

from shardmap_torch.errors import CollectiveError
from shardmap_torch.mesh import Mesh
from shardmap_torch.types import AxisType

if TYPE_CHECKING:  # for annotations only; at run time backends never know rules
    from shardmap_torch.boundary import Call
    from shardmap_torch.fit import Fit
    from shardmap_torch.rule import Collective, Operation


class Backend(Protocol):
    """Runs collectives for the ranks of one mesh; one instance per rank, or per batched body."""

    mesh: Mesh

    def run(self, move: str, collective: "Collective", x: Tensor) -> Tensor:
        """Moves the data of one collective, with no autograd; `move` as in the rows of `rule`."""
        ...

    def index(self, axes: Sequence[str]) -> Tensor:
        """This rank's position along `axes` (first is major): an int64 scalar."""
        ...

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """Values that vary over exactly one of `axes` each, where a batched body needs them."""
        ...

    def needs_ranks(self) -> None:
        """Hears that the body does what is only right where each rank runs by itself."""
        ...


Form: TypeAlias = Callable[..., tuple[Tensor, ...]]
"""One way to compute some results from some tensors, which autograd can differentiate."""


class Checker(Backend, Protocol):
    """Types a body instead of running it; see `is_checker`."""

    def hold(
        self,
        what: tuple[Hashable, ...],
        own: Form,
        composition: Form,
        operands: Sequence[Tensor],
    ) -> None:
        """Hears that a run may have `own`, with a backward of its own, for a composition.

        `what` tells the two forms: a name, and all else that they depend on.

        Raises:
            ShardTypeError: its results or gradients are not typed as those of the composition.
        """
        ...


def is_checker(backend: Backend) -> TypeGuard[Checker]:
    """Whether the body is being checked; isinstance of a Protocol takes 40 us."""
    return hasattr(backend, "hold")


@dataclass
class Note:
    """Something that a run asks for and only the checker can find out; it writes it down."""

    value: bool = False


class Follower(Protocol):
    """Sees what the code of a body asks of its mesh, in the order in which it does.

    While a body is checked it takes notes; at run time it compares with them. What autograd derives
    does not come here: it follows from what does.
    """

    @property
    def depth(self) -> float:
        """How much it has seen; infinite once the body has ended."""
        ...

    def meet(self, what: object, x: Tensor | None) -> None:
        """Sees an operation before it runs: the operation itself, or a tuple that tells it."""
        ...

    def kinds(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Sees that the type of `x` along `axes` is asked for, and tells it."""
        ...

    def note(self, what: object) -> "Note":
        """What the checker has found out at this step; while it checks, the place to write it."""
        ...

    def enter(self, what: object, call: "Call") -> "Mapping[int, tuple[Operation, ...]]":
        """Sees that an inner function begins, and tells what its inputs go through."""
        ...

    def leave(
        self, what: object, call: "Call", fit: "Fit", leaves: list[Tensor]
    ) -> "Mapping[int, tuple[Operation, ...]]":
        """The same where it ends, of its results."""
        ...

    def fork(self, what: object) -> "Follower":
        """Sees the start of what will call the user's code again, in a backward.

        The fork sees what comes before that, just as this one does.
        """
        ...

    def again(self, kind: Hashable) -> "Follower | None":
        """On a fork, what sees the user's code run again; None for what the checker has not seen.

        `kind` tells apart what may differ from one backward to the next.
        """
        ...

    def end(self, leaves: Sequence[object] = ()) -> None:
        """Hears that the code has ended, with these results."""
        ...


@dataclass(frozen=True)
class Scope:
    """What a body runs under: its backend, the mesh axes bound in it, and who follows it."""

    backend: Backend
    axes: frozenset[str]
    follower: Follower | None = None

    def meet(self, what: object, x: Tensor | None = None) -> None:
        """Shows an operation to the follower, if there is one."""
        if self.follower is not None:
            self.follower.meet(what, x)

    def kinds(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...] | None:
        """The types of `x` along `axes`, as the checker found them; None where it has not."""
        return None if self.follower is None else self.follower.kinds(axes, x)

    def fork(self, what: object) -> "Scope":
        """For what will call the user's code again, in a backward; see `Follower.fork`."""
        if self.follower is None:
            return self
        return Scope(self.backend, self.axes, self.follower.fork(what))

    def again(self, kind: Hashable) -> "Scope":
        """The scope of that code, from the one that `fork` gave."""
        if self.follower is None:
            return self
        return Scope(self.backend, self.axes, self.follower.again(kind))

    def end(self) -> None:
        """Ends what `again` began."""
        if self.follower is not None:
            self.follower.end()


class _Scopes(threading.local):
    def __init__(self) -> None:
        self.stack: list[Scope | None] = []


_SCOPES = _Scopes()


def current_scope() -> Scope | None:
    """The scope of the innermost body that runs on this thread, or None."""
    return _SCOPES.stack[-1] if _SCOPES.stack else None


class enter_scope:  # noqa: N801 - used as a function; a generator would cost each call 1 us
    """Makes `scope` the current one on this thread; None is the scope outside of any body."""

    def __init__(self, scope: Scope | None) -> None:
        """Nothing changes before the block is entered."""
        self._scope = scope

    def __enter__(self) -> None:
        """Enters it."""
        _SCOPES.stack.append(self._scope)

    def __exit__(self, *error: object) -> None:
        """Leaves it, whatever happened."""
        _SCOPES.stack.pop()


def scope_of(name: str, axes: Sequence[str]) -> Scope:
    """The current scope, after checking that `axes` may be used in it.

    Raises:
        CollectiveError: outside a body, or an axis is unknown, unbound or named twice.
    """
    scope = current_scope()
    if scope is None and torch._C._current_graph_task_id() != -1:
        raise CollectiveError(
            f"{name} was called in a backward pass that does not know the mesh of the body. Derive "
            "the autograd.Function whose backward calls it from shardmap_torch.Function, which "
            "keeps the mesh for its backward."
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
        return f"{name}: no axis {', '.join(map(repr, unknown))} in the {mesh}."
    unbound = [axis for axis in axes if axis not in scope.axes]
    if unbound:
        return (
            f"{name}: axis {', '.join(map(repr, unbound))} is not bound here; the body is mapped "
            f"over {bound}. Values are whole over the other axes; bind more with axis_names=."
        )
    return f"{name}: axes {axes} must be at least one name, each once."

"""Protocols of backends, checkers, monitors and drawings, which operations depend on."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, TypeGuard

from torch import Tensor

from shardmap_torch.collectives.operations import Collective, Mover, Operation, Planned
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.source_location import Site
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType, I, V


class Backend(Mover, Protocol):
    """Runs collectives for the ranks of one mesh; one instance per rank, or per batched body.

    Attributes:
        mesh: the mesh.
        readings: what arguments of collectives mean, where the same come again and again.
    """

    mesh: Mesh
    readings: Memo[Any] | None

    def plan(self, collective: Collective) -> Planned | None:
        """Returns what the collective runs here, looked up once; None where that has no plan."""
        ...

    def index(self, axes: Sequence[str]) -> Tensor:
        """Returns this rank's position along `axes` (first is major): an int64 scalar."""
        ...

    def rank_along(self, axes: tuple[str, ...]) -> int | None:
        """Returns the same as a number, where each rank runs the body by itself; else None."""
        ...

    def markers(self, axes: Sequence[str]) -> tuple[Tensor, ...]:
        """Returns, in a batched body, values that vary over exactly one of `axes` each."""
        ...

    def unshared(self, x: Tensor) -> Tensor:
        """Makes a value global over automatic axes; returns it where all values are."""
        ...

    def place_gradients(
        self, gradients: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        """Places gradients over automatic axes like the values to which they belong."""
        ...


class WithoutAutomaticAxes:
    """The part of a backend whose values are global over the axes that are not bound."""

    readings: Memo[Any] | None = None

    def plan(self, collective: Collective) -> Planned | None:
        """Returns None: only processes run the same collectives again and again."""
        return None

    def unshared(self, x: Tensor) -> Tensor:
        return x

    def place_gradients(
        self, gradients: Sequence[Tensor], leaves: Sequence[Tensor]
    ) -> Sequence[Tensor]:
        return gradients

    def rank_along(self, axes: tuple[str, ...]) -> int | None:
        """Returns None: all ranks run as one program, so that none of them is this one."""
        return None


class Checker(Backend, Protocol):
    """Types a body instead of running it; see `is_checker`."""

    def needs_ranks(self) -> None:
        """Notes that the body is right only if each rank runs it by itself, unbatched."""
        ...

    def read(self, x: Tensor) -> tuple[AxisType, AxisType]:
        """Returns the reading of a cast of `x`: of uncommitted values, and of copies."""
        ...

    def is_cast(self) -> bool:
        """Returns whether the equal result that is being made is cast; see `Readings`."""
        ...

    def reduction(self, op: str, axes: Sequence[str], x: object) -> tuple[str, int]:
        """Returns `op` and the number of ranks, unless a repair is tried that changes them."""
        ...

    def first_run(self) -> AbstractContextManager[object]:
        """Returns a context in which nothing records gradients, and code that runs again begins."""
        ...

    def seeing(self) -> AbstractContextManager[object]:
        """Returns a context in which code that a backward runs again is seen like the body."""
        ...

    def begin_call(
        self, written: Sequence[Tensor], read: Sequence[Tensor]
    ) -> Callable[[], AbstractContextManager[None]]:
        """Refuses to use what a call writes, and to write what it reads, until it has ended.

        Returns a context, for its end, in which its results arrive.
        """
        ...

    def reject_lost(self, name: str) -> None:
        """Refuses a call in the backward of a Function that torch.func would apply by itself.

        Raises:
            CollectiveError: it is in one, whose second derivative would leave the call out.
        """
        ...

    def note_asked(self, axes: Sequence[str]) -> None:
        """Notes that the body asks for the number of ranks along axes, or for its own."""
        ...

    def note_untraced(self, what: str) -> None:
        """Notes a call that torch.compile would differentiate otherwise."""
        ...

    def require(self, name: str, axes: Sequence[str], axis_type: AxisType, x: Tensor) -> None:
        """Requires that a value has this type along these axes; `name` is who says so.

        Raises:
            ShardTypeError: it has another one.
        """
        ...


def is_checker(backend: Backend) -> TypeGuard[Checker]:
    """Returns whether the body is being checked; isinstance of a Protocol takes 40 us."""
    return hasattr(backend, "first_run")


def sends_bundles(backend: Backend) -> bool:
    """Returns whether the small tensors of a tree are sent as one message, to save latency."""
    return getattr(backend, "bundles", False)


@dataclass(frozen=True)
class Edge:
    """One side of the boundary of a shard_map in the body of another: its inputs or its results.

    Attributes:
        name: name of the inner function in errors.
        axes: the axes that it binds.
        values: all leaves, in order.
        paths: their paths in the arguments or results.
        specs: their specs; None for static leaves.
        positions: positions of the leaves that are tensors and have a spec.
    """

    name: str
    axes: tuple[str, ...]
    values: Sequence[Any]
    paths: Sequence[str]
    specs: Sequence[P | None]
    positions: Sequence[int]

    def spec(self, position: int) -> P:
        """Returns the spec of a leaf that crosses."""
        spec = self.specs[position]
        assert spec is not None
        return spec


Casts: TypeAlias = Mapping[int, Sequence[Operation]]
"""Operations applied to leaves at a boundary, by position."""


@dataclass
class Readings:
    """The types for which JAX's casts take what has several; the same in all of a check.

    Attributes:
        uncommitted: the type that an uncommitted operand counts as in a cast to V: I as in JAX,
            whose cast then sums the gradient, or R, whose gradient stays a pending sum.
        copies: the type of equal values that JAX calls varying: V, or R with check="global", where
            ranks that may differ mean nothing on one device.
        asked: whether `uncommitted` has mattered.
        results: equations of collectives whose results JAX casts where they meet what varies,
            each with the lines of the user's that led to it.
        cast: those lines of which the results are cast, by which they become R.
    """

    uncommitted: AxisType = I
    copies: AxisType = V
    asked: bool = False
    results: dict[object, tuple[Site, ...]] = field(default_factory=dict)
    cast: set[tuple[Site, ...]] = field(default_factory=set)


@dataclass
class Note:
    """An answer that a run needs and only the checker can find: the checker writes, runs read.

    Attributes:
        value: an answer of yes or no.
        types: the types of a value along all mesh axes.
    """

    value: bool = False
    types: tuple[AxisType, ...] = ()


class Monitor(Protocol):
    """Observes the operations of a body in order.

    While a body is checked it records; at run time it compares with the record. Operations of the
    derived backward are not reported, since they follow from the reported ones.
    """

    @property
    def depth(self) -> float:
        """Number of steps seen; infinite once the body has ended."""
        ...

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Observes an operation before it runs: itself, or a tuple that describes it."""
        ...

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Observes a query for the types of `x` along `axes`, and returns them."""
        ...

    def note(self, what: object) -> Note:
        """Returns the note of this step: the checker's answer, or the place to write it."""
        ...

    def enter(self, what: object, edge: Edge) -> Casts:
        """Observes the start of an inner function, and returns the casts of its inputs."""
        ...

    def leave(self, what: object, edge: Edge) -> Casts:
        """Observes the end of an inner function, and returns the casts of its results."""
        ...

    def fork(self, what: object) -> "Reruns":
        """Observes the start of code that will run again in a backward."""
        ...

    def end(self, leaves: Sequence[object] = ()) -> None:
        """Observes the end of the code, with these results."""
        ...


Reruns: TypeAlias = Callable[[Hashable], Monitor | None]
"""Returns the monitor of code that runs again in a backward; None for code that was not checked.

Its argument distinguishes runs that may differ from one backward to the next.
"""


class Drawing(Protocol):
    """Seeds a body's draws from torch's default generator, according to their types."""

    def enter(self, monitor: Monitor | None) -> None:
        """Seeds the draws from here on; `monitor` has their types."""
        ...

    def leave(self) -> None:
        """Ends the newest `enter`."""
        ...

    def fork(self) -> "Redraws":
        """Notes the start of code that will run again in a backward."""
        ...


Redraws: TypeAlias = Callable[[Hashable], Drawing]
"""Returns the drawing of code that runs again in a backward, as `Reruns` does its monitor.

A checkpoint's repeats the draws of its first run.
"""

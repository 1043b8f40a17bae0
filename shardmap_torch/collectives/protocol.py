"""Protocols between operations, the meshes that run them, and what monitors a run."""

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeAlias, TypeGuard

from torch import Tensor

from shardmap_torch.collectives.operations import Mover, Operation
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType


class Backend(Mover, Protocol):
    """Runs collectives for the ranks of one mesh; one instance per rank, or per batched body."""

    mesh: Mesh

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

    def check_equivalent(
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
    """Returns whether the body is being checked; isinstance of a Protocol takes 40 us."""
    return hasattr(backend, "check_equivalent")


def sends_bundles(backend: Backend) -> bool:
    """Returns whether the small tensors of a tree go in one message: it has a latency to save."""
    return hasattr(backend, "bundles")


@dataclass(frozen=True)
class Edge:
    """One side of the boundary of a shard_map in the body of another: its inputs or its results.

    Attributes:
        name: the inner function, as errors call it.
        axes: the axes that it binds.
        values: all leaves, in order.
        paths: their places in the arguments or results.
        specs: their specs; None for what does not cross.
        positions: those of the leaves that are tensors and cross by a spec.
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
"""Operations that values go through at a boundary, by position."""


@dataclass
class Note:
    """Something that a run asks for and only the checker can find out; it writes it down.

    Attributes:
        value: an answer of yes or no.
        types: the types of a value along all mesh axes.
    """

    value: bool = False
    types: tuple[AxisType, ...] = ()


class Monitor(Protocol):
    """Sees what the code of a body asks of its mesh, in order.

    While a body is checked it records; at run time it compares with the record. What autograd
    derives does not come here: it follows from what does.
    """

    @property
    def depth(self) -> float:
        """Number of steps seen; infinite once the body has ended."""
        ...

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Sees an operation before it runs: the operation itself, or a tuple that describes it."""
        ...

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Sees that the types of `x` along `axes` are asked for, and returns them."""
        ...

    def note(self, what: object) -> Note:
        """Returns what the checker found out at this step, or the place to write it."""
        ...

    def enter(self, what: object, edge: Edge) -> Casts:
        """Sees that an inner function begins, and returns the casts of its inputs."""
        ...

    def leave(self, what: object, edge: Edge) -> Casts:
        """Sees that an inner function ends, and returns the casts of its results."""
        ...

    def fork(self, what: object) -> "Monitor":
        """Sees the start of code that runs again in a backward.

        The fork sees what comes before that, just as this one does.
        """
        ...

    def rerun(self, key: Hashable) -> "Monitor | None":
        """On a fork, returns the monitor of one such run; None for what was not checked.

        `key` tells apart what may differ from one backward to the next.
        """
        ...

    def end(self, leaves: Sequence[object] = ()) -> None:
        """Sees that the code has ended, with these results."""
        ...


class Drawing(Protocol):
    """Seeds what a body draws from torch's default generator, as the checker has typed it."""

    def enter(self, monitor: Monitor | None) -> None:
        """Seeds what is drawn from here on; `monitor` says how ranks share it."""
        ...

    def leave(self) -> None:
        """Ends the newest `enter`."""
        ...

    def fork(self) -> "LaterDrawing":
        """Returns what serves code that will run again, in a backward."""
        ...


class LaterDrawing(Drawing, Protocol):
    """The same for code that will run again."""

    def rerun(self, key: Hashable) -> Drawing:
        """Returns what serves one such run; that of a checkpoint draws what its first run drew."""
        ...

"""Records the body's collectives during a check; runs are compared with that record."""

from collections.abc import Hashable, Sequence
from functools import partial

from torch import Tensor

from shardmap_torch.checker.guards.places import look
from shardmap_torch.checker.guards.replay import TYPE, Step
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.verify.nested import NestedBoundaries
from shardmap_torch.collectives.operations import is_rounded_by
from shardmap_torch.collectives.protocol import Casts, Edge, Note, Reruns
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType


class Recording:
    """Notes a body's steps while it is interpreted; see `backend.Monitor`."""

    def __init__(self, interpreter: Interpreter, start: Step, inner: NestedBoundaries) -> None:
        """Adds to `start`, which may have the notes of other paths already."""
        self._interpreter, self._at, self._inner = interpreter, start, inner

    @property
    def depth(self) -> float:
        return self._at.depth

    def on_operation(self, what: object, x: Tensor | None) -> None:
        look()
        if x is not None and is_rounded_by(what, x):
            self._interpreter.needs_ranks()
        with DisableTorchFunction():  # the monitor asks for shapes, not the body
            self._at = self._at.then(what, x)

    def types_of(self, axes: tuple[str, ...], x: Tensor) -> tuple[AxisType, ...]:
        """Finds the types of `x`, and notes them for the runs, where values have none.

        Raises:
            ShardTypeError: they differ on another path that looks the same to a run.
        """
        interpreter = self._interpreter
        known = interpreter.by_axis(interpreter.storage_type(x).types)
        found = tuple(known[axis] for axis in axes)
        self.on_operation((TYPE, axes), x)
        if self._at.types not in ((), found):
            unlike = ShardTypeError(
                f"{interpreter.name}: the value at {call_site()} is {list(self._at.types)} over "
                f"{list(axes)} on one path through the body and {list(found)} on another, and "
                "a run cannot tell which path it takes. Pass the type as src=."
            )
            interpreter.numbers.branches.fail(unlike)
        self._at.types = found
        return found

    def note(self, what: object) -> Note:
        """Returns one note for all paths that look the same to a run."""
        self.on_operation(what, None)
        return self._at.note

    def enter(self, what: object, edge: Edge) -> Casts:
        """Notes the start of an inner function, whose backward decides its open axes."""
        self.on_operation(what, None)
        return self._inner.enter(edge, self._at.crossing)

    def leave(self, what: object, edge: Edge) -> Casts:
        """Notes the end of an inner function, and the conversions of its results."""
        self.on_operation(what, None)
        return self._inner.leave(edge, self._at.crossing)

    def fork(self, what: object) -> Reruns:
        """Notes that some code will run again; runs of different kinds have separate notes."""
        self.on_operation(what, None)
        return partial(self._later, self._at.later)

    def _later(self, later: dict[Hashable, Step], axis_type: Hashable) -> "Recording":
        return Recording(self._interpreter, later.setdefault(axis_type, Step()), self._inner)

    def end(self, leaves: Sequence[object] = ()) -> None:
        look()
        self._at.last = True

"""Records what a body does on its mesh during a check; runs are compared with that record."""

from collections.abc import Hashable, Sequence

from torch import Tensor

from shardmap_torch.checker.guards.holders import look
from shardmap_torch.checker.guards.monitor import TYPE, CheckedStep, StepMonitor
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.verify.nested import NestedBoundaries
from shardmap_torch.collectives.operations import is_rounded_by
from shardmap_torch.collectives.protocol import Casts, Edge
from shardmap_torch.core.source_location import call_site
from shardmap_torch.core.torch_private.engine import DisableTorchFunction
from shardmap_torch.errors import ShardTypeError
from shardmap_torch.types import AxisType


class CheckMonitor(StepMonitor):
    """Monitor that records the steps of a body while it is interpreted."""

    def __init__(
        self, interpreter: Interpreter, start: CheckedStep, inner: NestedBoundaries
    ) -> None:
        """Adds to `start`, which may have the steps of other paths already."""
        super().__init__(start)
        self._interpreter, self._inner = interpreter, inner

    def on_operation(self, what: object, x: Tensor | None) -> None:
        """Adds a step, unless another path has it."""
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
        found, note = tuple(known[axis] for axis in axes), self.note((TYPE, axes), x)
        if note.types not in ((), found):
            unlike = ShardTypeError(
                f"{interpreter.name}: the value at {call_site()} is {list(note.types)} over "
                f"{list(axes)} on one path through the body and {list(found)} on another, and "
                "a run cannot tell which path it takes. Pass the type as src=."
            )
            interpreter.numbers.branches.fail(unlike)
        note.types = found
        return found

    def enter(self, what: object, edge: Edge) -> Casts:
        """Notes the start of an inner function, whose backward decides its open axes."""
        self.on_operation(what, None)
        return self._inner.enter(edge, self._at.crossing)

    def leave(self, what: object, edge: Edge) -> Casts:
        """Notes the end of an inner function, and the conversions of its results."""
        self.on_operation(what, None)
        return self._inner.leave(edge, self._at.crossing)

    def rerun(self, later: dict[Hashable, CheckedStep], kind: Hashable) -> "CheckMonitor":
        """Records code that runs again; runs of different kinds have separate records."""
        start = later.setdefault(kind, CheckedStep())
        return CheckMonitor(self._interpreter, start, self._inner)

    def end(self, leaves: Sequence[object] = ()) -> None:
        """Notes that the code may end here."""
        look()
        self._at.last = True

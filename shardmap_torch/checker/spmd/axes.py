"""Strictness over some axes: both programs have the ranks of the others."""

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import COLLECTIVE
from shardmap_torch.checker.spmd.equivalence import Relation
from shardmap_torch.checker.spmd.layout import UnrelatedError, fitted
from shardmap_torch.checker.spmd.ops.movements import moved
from shardmap_torch.checker.spmd.recorder import Recorder
from shardmap_torch.checker.spmd.sums import reject_scaled
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective

Axes = frozenset[str]


class AxesRelation(Relation):
    """Follows the ranks' program over some axes: the other program has the same ranks on others."""

    def __init__(self, interpreter: Interpreter, steps: Recorder, axes: Axes) -> None:
        """Takes the `axes` over which nothing is compared, along which `steps` has ranks too."""
        super().__init__(interpreter, steps, without=axes)
        self._axes = axes

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """Moves data over the axes that are not compared, which leaves others' shards together."""
        others = collective is not None and not self._axes.issuperset(collective.axes)
        if (
            collective is None
            or self._axes.isdisjoint(collective.axes)
            or (others and move == "sum")
        ):
            super().on_collective(move, collective, x, y)
            return
        with self._judged(str(collective), [("x", x)]) as live:
            if live:
                event = self._take(COLLECTIVE)
                ((number, shape),) = event.results
                sums = self._notes.sums(x)
                if not self._axes.issuperset(collective.axes):
                    raise UnrelatedError("it goes over axes that are compared, and others")
                if move in EXTREMA and sums.partial:
                    raise UnrelatedError("its operand is a pending sum over another axis")
                if move in EXTREMA:
                    reject_scaled(sums)
                shard = self._notes.find(x, event.arguments["x"], "its operand")
                dims = moved(move, collective, shard, shape)
                self._notes.note(y, number, fitted(dims, tuple(y.shape), shape))
                self._notes.set_sums(y, sums)

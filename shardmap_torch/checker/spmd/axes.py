"""Strictness over some axes: both programs have the ranks of the others.

A collective over these others is a step of both programs, which leaves what the compared axes shard
together, as long as it does not go along such a dim.
"""

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Final

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import COLLECTIVE
from shardmap_torch.checker.spmd.equivalence import Relation
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    in_words,
    merged,
    unsharded,
)
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
                if others:
                    raise UnrelatedError("it goes over axes that are compared, and others")
                if move in EXTREMA and sums.partial:
                    raise UnrelatedError("its operand is a pending sum over another axis")
                if move in EXTREMA:
                    reject_scaled(sums)
                shard = self._notes.find(x, event.arguments["x"], "its operand")
                dims = moved(move, collective, shard, shape)
                self._notes.note(y, number, fitted(dims, tuple(y.shape), shape))
                self._notes.set_sums(y, sums)


def moved(move: str, collective: Collective, x: ShardedTensor, shape: Shape) -> Sequence[Dim]:
    """Returns the layout of the result, of that shape where the compared axes have one rank.

    Raises:
        UnrelatedError: it moves what the compared axes shard apart.
    """
    if move not in _ALONG or collective.sizes is not None or collective.concat_sizes is not None:
        raise UnrelatedError(
            "beside axes that are compared, nothing is known of what it moves",
            "name all axes in the types of the region, or in check=.",
        )
    at = collective.dim
    if move == "gather" and not collective.tiled:
        return [*x.dims[:at], unsharded(shape[at]), *x.dims[at:]]
    along = {getattr(collective, name) for name in _ALONG[move]}
    if along and not collective.tiled:
        raise UnrelatedError("it makes or takes a dim with one entry per rank", "use tiled=True.")
    if move == "gather" and x.dims[at] != ANY:  # shards of the ranks, one behind the other
        count = shape[at] // max(x.global_shape[at], 1)
        return [*x.dims[:at], tuple(merged([(None, count), *x.dims[at]])), *x.dims[at + 1 :]]
    for at in along:
        if x.dims[at] == ANY or axes_of(x.dims[at]):
            raise UnrelatedError(f"it goes along dim {at}, which is {in_words(x.dims[at])}")
    return [unsharded(shape[at]) if at in along else dim for at, dim in enumerate(x.dims)]


_ALONG: Final[Mapping[str, Sequence[str]]] = MappingProxyType(
    {
        "exchange": ("dim", "concat_dim"),
        **dict.fromkeys(("gather", "sum_scatter", "slice", "pad"), ("dim",)),
        **dict.fromkeys(("sum", "max", "min", "permute", "broadcast"), ()),
        **dict.fromkeys(("mask", "sum_mask", "same"), ()),
    }
)
"""Dims along which collectives go; others are refused, as an exchange by numbers of rows."""

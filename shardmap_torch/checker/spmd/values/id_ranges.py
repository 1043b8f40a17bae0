"""Values about a rank's part of all ids: masks of it, ids counted from its first, lookups."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.layout import Dim, ShardedTensor, UnrelatedError, axes_of
from shardmap_torch.checker.spmd.ops.aten_rules import propagate
from shardmap_torch.checker.spmd.recorder import Ref, TensorMap
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded, Step
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import Sums
from shardmap_torch.checker.spmd.values.positions import (
    Affine,
    Pair,
    Positions,
    is_whole,
    name_of,
    resolved,
)
from shardmap_torch.checker.spmd.values.rows import followed, without_rows

Arguments: TypeAlias = Mapping[str, Any]

_AS_IT_IS: Final[Arguments] = {}
_INTEGERS: Final = (torch.int32, torch.int64)

MASK: Final = "mask"
OFFSET: Final = "offset"
LOOKED_UP: Final = "looked up"


@dataclass(frozen=True)
class IdRange:
    """A value that is about the ids from `lower` on and below `upper`.

    Attributes:
        form: MASK says whether they are (or not, unless `inside`), where a bound is None of all ids
            on one side. OFFSET is the id minus `lower`, of them or of all ids if `upper` is None.
            LOOKED_UP is the value on one device, of them.
        ids: the number of the ids on one device.
        rows: the layout by the ids, on one device.
        lower: the first id in both programs.
        upper: the id behind the last one.
        inside: see `form`.
    """

    form: str
    ids: int
    rows: ShardedTensor
    lower: Pair | None
    upper: Pair | None
    inside: bool = True

    def is_about(self, other: "IdRange") -> bool:
        """Returns whether two values are about the same ids."""
        return (self.ids, self.lower, self.upper) == (other.ids, other.lower, other.upper)


@dataclass(frozen=True, eq=False)
class IdRangeCall(PairedCall):
    """An operation on values about ranges of ids, in both programs.

    Attributes:
        parts: what is known of its arguments.
        shards: their layouts.
    """

    parts: Mapping[str, IdRange]
    shards: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the overload."""
        return name_of(self.op)

    def rows(self, like: IdRange, replaced: Arguments = _AS_IT_IS) -> ShardedTensor | None:
        """Lays out the result by the ids; None if its entries depend on several."""
        arguments = {name: self._by_rows(name, self.shards[name]) for name in self.shards}
        shape = self.event.results[0][1]
        return followed(self.op, {**arguments, **replaced}, shape, like.rows)

    def _by_rows(self, name: str, shard: Any) -> Any:
        if isinstance(shard, ShardedTensor):
            part = self.parts.get(name)
            return without_rows(shard.global_shape) if part is None else part.rows
        return self.event.arguments.get(name)


class KnownIdRanges:
    """The values that are about a rank's part of all ids, and what rules ask of them.

    Attributes:
        parts: what tensors are about.
        zeros: the tensors that are zero.
    """

    def __init__(self, notes: Notes, positions: Positions) -> None:
        """Knows of none; bounds are among `positions`."""
        self._notes, self._positions = notes, positions
        self.parts: TensorMap[IdRange] = TensorMap()
        self.zeros: TensorMap[bool] = TensorMap()
        self._copies: TensorMap[int] = TensorMap()

    def drop(self, x: Tensor) -> None:
        """Forgets what a tensor is, since it is written."""
        self.parts.drop(x)
        self.zeros.drop(x)

    def follow_copy(self, call: PairedCall) -> None:
        """Notes copies of ids, and views of zeros."""
        x, (result, *_) = call.arguments["self"], call.results
        if self.zeros.get(x):
            self.zeros.put(result, True)
        if name_of(call.op) == "clone" and not x.is_floating_point():
            number = self.ids_of(x, call.event.arguments.get("self"))
            if number is not None:
                self._copies.put(result, number)

    def are_finished(self, call: PairedCall) -> bool:
        """Returns whether all operands but parts are what they are on one device."""
        try:
            for x in call.tensors:
                if self.parts.get(x) is None:
                    self._notes.reject_unfinished(x)
                if self._notes.sums(x).partial:
                    return False
        except UnrelatedError:
            return False
        return True

    def index_of(self, index: Any) -> tuple[int, IdRange] | None:
        """Returns which index is about a part of all ids, if one is and none is a mask."""
        indices = [index] if isinstance(index, Tensor) else index or ()
        parts = [
            (at, part)
            for at, x in enumerate(indices)
            if isinstance(x, Tensor) and (part := self.parts.get(x))
        ]
        masks = any(isinstance(x, Tensor) and x.dtype not in _INTEGERS for x in indices)
        return parts[0] if len(parts) == 1 and not masks else None

    def ids_of(self, x: Any, ref: Any) -> int | None:
        """Returns the number of ids that are finished; None for anything else."""
        if not isinstance(x, Tensor) or not isinstance(ref, Ref) or x.dtype not in _INTEGERS:
            return None
        if self._notes.sums(x) != Sums() or self._positions.is_written(x) or self.parts.get(x):
            return None
        return self._copies.get(x) or self._notes.canonical(ref)

    def bound(self, x: Any, there: Any = None) -> Pair | None:
        """Returns a single number in both programs that is known; None for anything else."""
        if is_whole(x) and is_whole(there):
            return Pair(Affine.single(x), Affine.single(there))
        pair = self._positions.pair_of(x) if isinstance(x, Tensor) else None
        if pair is None or any(size != 1 for size in (*pair.here.shape, *pair.there.shape)):
            return None
        return pair.scalar()

    def is_of_ranks(self, bound: Pair) -> bool:
        """Returns whether a bound differs between ranks."""
        return any(bound.here.axes.get(axis) for axis in self._notes.sizes)

    def dim_between(self, lower: Pair | None, upper: Pair | None) -> Dim | None:
        """Lays out the range between bounds; None if the ranks' are no shards of it."""
        if lower is None or upper is None:
            return None
        sizes = upper.minus(lower)
        if sizes is None or min(sizes) < 1:
            return None
        ranges = [
            Affine((n,), first.base, (0 if n == 1 else 1,), first.axes)
            for n, first in zip(sizes, (lower.here, lower.there), strict=True)
        ]
        dims = resolved(Pair(*ranges), self._notes.sizes)
        return dims[0] if dims and axes_of(dims[0]) else None

    def counted_from(self, first: Pair, x: Any) -> ShardedTensor | None:
        """Lays out `x + first`, of positions; None if these are no shards of those there."""
        pair = self._positions.pair_of(x) if isinstance(x, Tensor) else None
        if pair is None:
            return None
        here, there = pair.here.plus(first.here, pair.here.shape), pair.there
        there = there.plus(first.there, there.shape)
        dims = resolved(Pair(here, there), self._notes.sizes)
        return None if dims is None else ShardedTensor(dims, here.shape, there.shape)

    def is_zero(self, value: Any) -> bool:
        """Returns whether it is 0, or a tensor of zeros."""
        if isinstance(value, Tensor):
            return self.zeros.get(value) is not None or self._notes.sums(value).zero
        return (is_whole(value) and value == 0) or (isinstance(value, float) and value == 0)

    def dims(self, call: IdRangeCall, replaced: Arguments = _AS_IT_IS) -> list[Sharded] | None:
        """Lays out a result by the operation's own rule; None if that refuses it."""
        shards, sizes = {**call.shards, **replaced}, self._notes.sizes
        try:
            return propagate(
                Step(call.op, shards, call.differing, call.tensors, call.shapes, sizes)
            )
        except UnrelatedError:
            return None

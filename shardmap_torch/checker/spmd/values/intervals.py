"""Ids of a rank's part of a vocabulary, as in `w[torch.where(mask, ids - start, 0)] * mask`.

On one device all ids are in the part. On ranks the masks of the parts add up to that mask, since
the parts are the shards of one range. An entry that is looked up in a rank's part of a table is the
one on one device where the mask is true, and the mask makes it an addend of it. Nothing else is
done with masks, with ids counted from a rank's first one, and with what is looked up by them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.infer import writes_of
from shardmap_torch.checker.spmd.align import differing
from shardmap_torch.checker.spmd.layout import (
    Dim,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    unsharded,
)
from shardmap_torch.checker.spmd.op_rules import propagate
from shardmap_torch.checker.spmd.recorder import Event, Ref, TensorMap
from shardmap_torch.checker.spmd.sharded import Sharded, Step
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
from shardmap_torch.checker.spmd.values.rows import by_rows, followed, rows_of, without_rows
from shardmap_torch.core.torch_private.engine import OpOverload

Given: TypeAlias = Mapping[str, Any]

_AS_IT_IS: Final[Given] = {}

MASK: Final = "mask"
OFFSET: Final = "offset"
LOOKED_UP: Final = "looked up"


@dataclass(frozen=True)
class Part:
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

    def is_about(self, other: "Part") -> bool:
        """Returns whether two values are about the same ids."""
        return (self.ids, self.lower, self.upper) == (other.ids, other.lower, other.upper)


@dataclass(frozen=True)
class _Call:
    """An operation on parts, in both programs."""

    op: OpOverload
    arguments: Mapping[str, Any]
    event: Event
    results: Sequence[Tensor]
    parts: Mapping[str, Part]
    shards: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The name of the overload."""
        return name_of(self.op)

    def rows(self, like: Part, replaced: Given = _AS_IT_IS) -> ShardedTensor | None:
        """Lays out the result by the ids; None if its entries depend on several."""
        given = {name: self._by_rows(name, self.shards[name]) for name in self.shards}
        shape = self.event.results[0][1]
        return followed(self.op, {**given, **replaced}, shape, like.rows)

    def _by_rows(self, name: str, shard: Any) -> Any:
        if isinstance(shard, ShardedTensor):
            part = self.parts.get(name)
            return without_rows(shard.global_shape) if part is None else part.rows
        return self.event.arguments.get(name)


Found: TypeAlias = tuple[Part | None, list[Sharded]] | None


class Intervals:
    """The values that are about a rank's part of all ids."""

    def __init__(self, notes: Notes, positions: Positions) -> None:
        """Knows of none; bounds are among `positions`."""
        self._notes, self._positions = notes, positions
        self._parts: TensorMap[Part] = TensorMap()
        self._zeros: TensorMap[bool] = TensorMap()
        self._copies: TensorMap[int] = TensorMap()

    def note_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Notes a tensor made of Python numbers."""
        if not bool(numbers.any()):
            self._zeros.put(made, True)

    def lay_out(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, results: Sequence[Tensor]
    ) -> list[Sharded] | None:
        """Lays out what is about a part of all ids, or summed over parts; None for any other."""
        found = self._found(op, arguments, event, results)
        for name in writes_of(op, arguments):
            for x in tensors_in(arguments[name]):
                self._parts.drop(x)
                self._zeros.drop(x)
        if found is None:
            return None
        part, sharded = found
        if part is not None:
            self._parts.put(results[0], part)
        return sharded

    def _found(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, results: Sequence[Tensor]
    ) -> Found:
        """Finds the rule for an operation, if its operands are known."""
        name = name_of(op)
        parts = {
            key: part
            for key, x in (arguments.items() if self._parts else ())
            if isinstance(x, Tensor) and (part := self._parts.get(x))
        }
        call = _Call(op, arguments, event, results, parts, {})
        rule = _RULES.get(name)
        indices = tensors_in(arguments.get("indices")) if self._parts else ()
        indexed = any(self._parts.get(x) for x in indices)
        if not (parts or indexed or name in _STARTS) or rule is None or len(results) != 1:
            self._follow_plain(call)
            return None
        if name not in _STARTS and not self.are_finished(call):
            return None
        try:
            refs = event.arguments
            shards = {key: self._shards(x, refs.get(key)) for key, x in arguments.items()}
        except UnrelatedError:
            return None
        return rule(self, replace(call, shards=shards))

    def _follow_plain(self, call: _Call) -> None:
        """Follows copies of ids, and views of zeros."""
        x = call.arguments.get("self")
        if call.name not in _KEPT or not isinstance(x, Tensor) or len(call.results) != 1:
            return
        if self._zeros.get(x):
            self._zeros.put(call.results[0], True)
        if call.name == "clone" and not x.is_floating_point():
            number = self.ids_of(x, call.event.arguments.get("self"))
            if number is not None:
                self._copies.put(call.results[0], number)

    def _shards(self, value: Any, ref: Any) -> Any:
        if isinstance(value, Tensor) and isinstance(ref, Ref):
            return self._notes.find(value, ref, "")
        if isinstance(value, list | tuple) and tensors_in(value):
            return [self._shards(*each) for each in zip(value, ref, strict=True)]
        return value

    # ------------------------------------------------------------------------ what rules ask

    def are_finished(self, call: _Call) -> bool:
        """Returns whether all operands but parts are what they are on one device."""
        try:
            for x in tensors_in([*call.arguments.values()]):
                if self._parts.get(x) is None:
                    self._notes.reject_unfinished(x)
                if self._notes.sums(x).partial:
                    return False
        except UnrelatedError:
            return False
        return True

    def part_of(self, x: Tensor) -> Part | None:
        """Returns what is known of a tensor."""
        return self._parts.get(x)

    def index_of(self, index: Any) -> tuple[int, Part] | None:
        """Returns which index is about a part of all ids, if one is and none is a mask."""
        given = [index] if isinstance(index, Tensor) else index or ()
        found = [
            (at, part)
            for at, x in enumerate(given)
            if isinstance(x, Tensor) and (part := self._parts.get(x))
        ]
        masks = any(isinstance(x, Tensor) and x.dtype not in _INTEGERS for x in given)
        return found[0] if len(found) == 1 and not masks else None

    def ids_of(self, x: Any, ref: Any) -> int | None:
        """Returns the number of ids that are finished; None for anything else."""
        if not isinstance(x, Tensor) or not isinstance(ref, Ref) or x.dtype not in _INTEGERS:
            return None
        if self._notes.sums(x) != Sums() or self._positions.is_written(x) or self._parts.get(x):
            return None
        return self._copies.get(x) or self._notes.canonical(ref)

    def bound(self, x: Any, there: Any = None) -> Pair | None:
        """Returns a single number in both programs that is known; None for anything else."""
        if is_whole(x) and is_whole(there):
            return Pair(Affine((), x, (), {}), Affine((), there, (), {}))
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

    def is_zero(self, value: Any) -> bool:
        """Returns whether it is 0, or a tensor of zeros."""
        if isinstance(value, Tensor):
            return self._zeros.get(value) is not None or self._notes.sums(value).zero
        return (is_whole(value) and value == 0) or (isinstance(value, float) and value == 0)

    def dims(self, call: _Call, replaced: Given = _AS_IT_IS) -> list[Sharded] | None:
        """Lays out a result by the operation's own rule; None if that refuses it."""
        plain = {name: x for name, x in call.arguments.items() if not tensors_in(x)}
        tensors = tensors_in([*call.arguments.values()])
        shape = tuple(call.results[0].shape)
        try:
            return propagate(
                Step(
                    *(call.op, {**call.shards, **replaced}, differing(plain, call.event), tensors),
                    *([(shape, call.event.results[0][1])], self._notes.sizes),
                )
            )
        except UnrelatedError:
            return None


# ------------------------------------------------------------------------------------ masks


def _compared(lower: bool, closed: bool) -> "Rule":
    """Makes the rule of a comparison of ids with a bound, or of offsets with a number."""

    def rule(known: Intervals, call: _Call) -> Found:
        there = call.event.arguments
        for ids, other, is_lower in (("self", "other", lower), ("other", "self", not lower)):
            bound = known.bound(call.arguments[other], there[other])
            part, shard = call.parts.get(ids), call.shards.get(ids)
            if bound is None or not isinstance(shard, ShardedTensor):
                continue
            if shard.global_shape != call.event.results[0][1]:
                continue
            number = known.ids_of(call.arguments[ids], there[ids])
            if part is not None and part.form == OFFSET and part.upper is None and part.lower:
                bound, rows = bound.plus(part.lower), part.rows
                number = part.ids
            elif number is not None and known.is_of_ranks(bound):
                rows = rows_of(shard.global_shape)
            else:
                continue
            bound = bound.scalar(int(closed != is_lower))
            bounds = (bound, None) if is_lower else (None, bound)
            return Part(MASK, number, rows, *bounds), [Sharded(shard.dims)]
        return None

    return rule


def _both(known: Intervals, call: _Call) -> Found:
    """Intersects all ids on one side of a bound with those on the other side of another."""
    x, y = call.parts.get("self"), call.parts.get("other")
    if x is None or y is None or not _are_masks(x, y) or x.ids != y.ids:
        return None
    lower, upper = (x, y) if x.lower is not None else (y, x)
    if lower.upper is not None or upper.lower is not None or lower.rows != upper.rows:
        return None
    dims = known.dims(call)
    if dims is None or known.dim_between(lower.lower, upper.upper) is None:
        return None
    return replace(lower, upper=upper.upper), dims


def _either(known: Intervals, call: _Call) -> Found:
    """Unites them: the ids that are on the other side of neither."""
    found = _both(known, replace(call, parts={k: _not(x) for k, x in call.parts.items()}))
    return None if found is None or found[0] is None else (_not(found[0]), found[1])


def _are_masks(*parts: Part) -> bool:
    return all(part.form == MASK and part.inside for part in parts)


def _not(x: Part) -> Part:
    if x.lower is not None and x.upper is not None:
        return replace(x, inside=not x.inside)
    return replace(x, lower=x.upper, upper=x.lower)


def _negated(known: Intervals, call: _Call) -> Found:
    x, dims = call.parts["self"], known.dims(call)
    return None if x.form != MASK or dims is None else (_not(x), dims)


# ------------------------------------------------------------------------------ other steps


def _counted(known: Intervals, call: _Call) -> Found:
    """Counts ids from a rank's first one."""
    there = call.event.arguments
    number = known.ids_of(call.arguments["self"], there["self"])
    bound = known.bound(call.arguments["other"], there["other"])
    shard = call.shards["self"]
    if number is None or bound is None or not known.is_of_ranks(bound):
        return _pointwise(known, call)
    if call.arguments.get("alpha", 1) != 1 or shard.global_shape != call.event.results[0][1]:
        return None
    rows = rows_of(shard.global_shape)
    return Part(OFFSET, number, rows, bound, None), [Sharded(shard.dims)]


def _kept(known: Intervals, call: _Call) -> Found:
    x, dims = call.parts.get("self"), known.dims(call)
    rows = None if x is None else call.rows(x)
    if x is None or dims is None or rows is None:
        return None
    return replace(x, rows=rows), dims


def _pointwise(known: Intervals, call: _Call) -> Found:
    """Scales or shifts entries that are right for some ids: the others stay finite."""
    first, *more = call.parts.values() or [None]
    if first is None or any(x.form != LOOKED_UP or not x.is_about(first) for x in (first, *more)):
        return None
    if writes_of(call.op, call.arguments) or not known.are_finished(call):
        return None
    dims, rows = known.dims(call), call.rows(first)
    return None if dims is None or rows is None else (replace(first, rows=rows), dims)


def _divided(known: Intervals, call: _Call) -> Found:
    return None if "other" in call.parts else _pointwise(known, call)


def _clamped(known: Intervals, call: _Call) -> Found:
    """Limits ids that are counted from a rank's first one to those of its part."""
    x, there = call.parts.get("self"), call.event.arguments
    first = known.bound(call.arguments.get("min"), there.get("min"))
    last = known.bound(call.arguments.get("max"), there.get("max"))
    if x is None or x.form != OFFSET or x.upper is not None or x.lower is None:
        return _pointwise(known, call)
    if last is None or first != Pair(Affine((), 0, (), {}), Affine((), 0, (), {})):
        return None
    upper = last.plus(x.lower).scalar(1)
    if known.dim_between(x.lower, upper) is None:
        return None
    return replace(x, upper=upper), [Sharded(call.shards["self"].dims)]


def _multiplied(known: Intervals, call: _Call) -> Found:
    for target, mask in (("self", "other"), ("other", "self")):
        part = call.parts.get(mask)
        if part is not None and part.form == MASK:
            return _masked(known, call, target, mask, True, 0)
    return _pointwise(known, call)


def _chosen(known: Intervals, call: _Call) -> Found:
    mask = call.parts.get("condition")
    if mask is None:
        return _pointwise(known, call)
    target, other = ("self", "other") if mask.inside else ("other", "self")
    return _masked(known, call, target, "condition", mask.inside, call.arguments[other])


def _filled(known: Intervals, call: _Call) -> Found:
    return _masked(known, call, "self", "mask", False, call.arguments["value"])


def _written(known: Intervals, call: _Call) -> Found:
    """Does `x[mask] = value`, where the mask is about the first dims."""
    x, there = call.parts.get("self"), call.event.arguments
    masks = [index for index in call.arguments["indices"] if index is not None]
    mask = known.part_of(masks[0]) if len(masks) == 1 else None
    if x is None or mask is None or call.arguments.get("accumulate") or there.get("accumulate"):
        return None
    at = [index is not None for index in call.arguments["indices"]].index(True)
    num = len(mask.rows.dims)
    if x.rows.dims[at : at + num] != mask.rows.dims or call.results[0].ndim < at + num:
        return None
    if call.shards["values"].global_shape not in ((), (1,)):
        return None
    dims = [Sharded(call.shards["self"].dims)]
    return _made(known, call, x, mask, False, call.arguments["values"], x.rows, dims)


def _masked(
    known: Intervals, call: _Call, target: str, mask: str, inside: bool, fill: Any
) -> Found:
    """Keeps the entries of some ids, and puts a value in place of all others."""
    x, by = call.parts.get(target), call.parts.get(mask)
    if x is None or by is None or len(call.parts) != 2:
        return None
    dims, rows = known.dims(call), call.rows(x)
    if dims is None or rows is None:
        return None
    return _made(known, call, x, by, inside, fill, rows, dims)


def _made(
    known: Intervals,
    call: _Call,
    x: Part,
    mask: Part,
    inside: bool,
    fill: Any,
    rows: ShardedTensor,
    dims: list[Sharded],
) -> Found:
    between = known.dim_between(mask.lower, mask.upper)
    if mask.form != MASK or mask.inside != inside or between is None or x.ids != mask.ids:
        return None
    if not known.is_zero(fill):
        return None
    if x.form == OFFSET and x.lower == mask.lower and x.upper in (None, mask.upper):
        return replace(x, rows=rows, upper=mask.upper), dims
    if x.form != LOOKED_UP or not x.is_about(mask):
        return None
    axes = frozenset(axes_of(between))
    return None, [replace(each, partial=each.partial | axes) for each in dims]


# ---------------------------------------------------------------------------------- lookups


def _looked_up(table: str, index: str) -> "Rule":
    """Makes the rule of an operation that picks entries of a table of which ranks have shards."""

    def rule(known: Intervals, call: _Call) -> Found:
        x, found = call.shards[table], known.index_of(call.arguments[index])
        if found is None or table in call.parts or _counts_otherwise(call.arguments):
            return None
        at, part = found
        if table != "weight":
            at = call.arguments["dim"] % max(len(x.dims), 1) if "dim" in call.arguments else at
        if part.form != OFFSET or part.lower is None or not x.dims:
            return None
        size = Pair(Affine((), x.local[at], (), {}), Affine((), x.global_shape[at], (), {}))
        upper = part.lower.plus(size)
        if known.dim_between(part.lower, upper) != x.dims[at] or part.upper != upper:
            return None
        dims = known.dims(call, {table: _gathered(x, at)})
        rows = _rows_of_lookup(call, x, at, part, table, index)
        if dims is None or rows is None:
            return None
        return replace(part, form=LOOKED_UP, upper=upper, rows=rows), dims

    return rule


def _counts_otherwise(arguments: Mapping[str, Any]) -> bool:
    """Returns whether an embedding has gradients that depend on ids in another way."""
    return bool(arguments.get("scale_grad_by_freq")) or arguments.get("padding_idx", -1) != -1


def _gathered(x: ShardedTensor, at: int) -> ShardedTensor:
    size = x.global_shape[at]
    return ShardedTensor(
        (*x.dims[:at], unsharded(size), *x.dims[at + 1 :]),
        (*x.local[:at], size, *x.local[at + 1 :]),
        x.global_shape,
    )


def _rows_of_lookup(
    call: _Call, x: ShardedTensor, at: int, part: Part, table: str, index: str
) -> ShardedTensor | None:
    shape = call.event.results[0][1]
    if call.name == "index.Tensor":
        plain = ShardedTensor.unsharded(x.global_shape)
        given = [
            shard if shard is None else part.rows if n == at else without_rows(shard.global_shape)
            for n, shard in enumerate(call.shards[index])
        ]
        return call.rows(part, {"self": plain, "indices": given})
    others = [unsharded(size) for size in x.global_shape]
    dims = (*others[:at], *part.rows.dims, *others[at + 1 :])
    dims = part.rows.dims if call.name == "gather" else dims
    return by_rows(dims, shape) if len(dims) == len(shape) else None


Rule: TypeAlias = Callable[[Intervals, _Call], Found]

_INTEGERS: Final = (torch.int32, torch.int64)

_KEPT: Final = (
    "view _unsafe_view reshape _reshape_alias unsqueeze squeeze squeeze.dim squeeze.dims permute t"
    " transpose.int expand clone alias detach _to_copy slice.Tensor"
).split()

_COMPARISONS: Final = {
    f"{name}.{overload}": _compared(lower, closed)
    for name, lower, closed in (
        ("ge", True, True),
        ("gt", True, False),
        ("lt", False, False),
        ("le", False, True),
    )
    for overload in ("Tensor", "Scalar")
}

_STARTS: Final = frozenset({*_COMPARISONS, "sub.Tensor"})

_RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(_KEPT, _kept),
    **_COMPARISONS,
    "sub.Tensor": _counted,
    **dict.fromkeys(("bitwise_and.Tensor", "logical_and"), _both),
    **dict.fromkeys(("bitwise_or.Tensor", "logical_or"), _either),
    **dict.fromkeys(("bitwise_not", "logical_not"), _negated),
    "clamp": _clamped,
    **dict.fromkeys(("mul.Tensor", "mul_.Tensor"), _multiplied),
    "where.self": _chosen,
    **dict.fromkeys(("add.Tensor", "neg"), _pointwise),
    "div.Tensor": _divided,
    **dict.fromkeys(("masked_fill.Scalar", "masked_fill_.Scalar"), _filled),
    **dict.fromkeys(("masked_fill.Tensor", "masked_fill_.Tensor"), _filled),
    "index_put_": _written,
    "index.Tensor": _looked_up("self", "indices"),
    "index_select": _looked_up("self", "index"),
    "gather": _looked_up("self", "index"),
    "embedding": _looked_up("weight", "indices"),
}

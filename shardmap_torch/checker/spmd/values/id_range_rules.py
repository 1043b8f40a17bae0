"""Rules of the operations on a rank's part of all ids: masks, counted ids, lookups.

A rule lays the result out and says what it is about; it gives None for what it does not know.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any, Final, TypeAlias

from shardmap_torch.checker.spmd.layout import ShardedTensor, axes_of, broadcast, unsharded
from shardmap_torch.checker.spmd.sharded import Sharded
from shardmap_torch.checker.spmd.values.id_ranges import (
    LOOKED_UP,
    MASK,
    OFFSET,
    IdRange,
    IdRangeCall,
    KnownIdRanges,
)
from shardmap_torch.checker.spmd.values.positions import Affine, Pair
from shardmap_torch.checker.spmd.values.rows import COPIES, by_rows, rows_of, without_rows

Outcome: TypeAlias = tuple[IdRange | None, list[Sharded]] | None
Rule: TypeAlias = Callable[[KnownIdRanges, IdRangeCall], Outcome]

# ------------------------------------------------------------------------------------ masks


def _compared(lower: bool, closed: bool) -> Rule:
    """Makes the rule of a comparison of ids with a bound, or of offsets with a number."""

    def rule(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
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
            return IdRange(MASK, number, rows, *bounds), [Sharded(shard.dims)]
        return None

    return rule


def _both(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
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


def _either(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    """Unites them: the ids that are on the other side of neither."""
    both = _both(known, replace(call, parts={k: _not(x) for k, x in call.parts.items()}))
    return None if both is None or both[0] is None else (_not(both[0]), both[1])


def _are_masks(*parts: IdRange) -> bool:
    return all(part.form == MASK and part.inside for part in parts)


def _not(x: IdRange) -> IdRange:
    if x.lower is not None and x.upper is not None:
        return replace(x, inside=not x.inside)
    return replace(x, lower=x.upper, upper=x.lower)


def _negated(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    x, dims = call.parts["self"], known.dims(call)
    return None if x.form != MASK or dims is None else (_not(x), dims)


# ------------------------------------------------------------------------------ other steps


def _counted(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
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
    return IdRange(OFFSET, number, rows, bound, None), [Sharded(shard.dims)]


def _matched(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    """Compares ids that are counted from a rank's first one with positions in its part."""
    for ids, other in (("self", "other"), ("other", "self")):
        part, shard = call.parts.get(ids), call.shards[ids]
        if part is None or part.form != OFFSET or part.upper is not None or part.lower is None:
            continue
        positions = known.counted_from(part.lower, call.arguments[other])
        if positions is not None:
            rank = len(call.event.results[0][1])
            return None, [Sharded(broadcast([shard, positions], rank))]
    return None


def _kept(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    x, dims = call.parts.get("self"), known.dims(call)
    rows = None if x is None else call.rows(x)
    if x is None or dims is None or rows is None:
        return None
    return replace(x, rows=rows), dims


def _pointwise(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    """Scales or shifts entries that are right for some ids: the others stay finite."""
    first, *more = call.parts.values() or [None]
    if first is None or any(x.form != LOOKED_UP or not x.is_about(first) for x in (first, *more)):
        return None
    if call.written or not known.are_finished(call):
        return None
    dims, rows = known.dims(call), call.rows(first)
    return None if dims is None or rows is None else (replace(first, rows=rows), dims)


def _divided(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    return None if "other" in call.parts else _pointwise(known, call)


def _clamped(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    """Limits ids that are counted from a rank's first one to those of its part."""
    x, there = call.parts.get("self"), call.event.arguments
    first = known.bound(call.arguments.get("min"), there.get("min"))
    last = known.bound(call.arguments.get("max"), there.get("max"))
    if x is None or x.form != OFFSET or x.upper is not None or x.lower is None:
        return _pointwise(known, call)
    if last is None or first != Pair(Affine.single(0), Affine.single(0)):
        return None
    upper = last.plus(x.lower).scalar(1)
    if known.dim_between(x.lower, upper) is None:
        return None
    return replace(x, upper=upper), [Sharded(call.shards["self"].dims)]


def _multiplied(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    for target, mask in (("self", "other"), ("other", "self")):
        part = call.parts.get(mask)
        if part is not None and part.form == MASK:
            return _masked(known, call, target, mask, True, 0)
    return _pointwise(known, call)


def _chosen(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    mask = call.parts.get("condition")
    if mask is None:
        return _pointwise(known, call)
    target, other = ("self", "other") if mask.inside else ("other", "self")
    return _masked(known, call, target, "condition", mask.inside, call.arguments[other])


def _filled(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    return _masked(known, call, "self", "mask", False, call.arguments["value"])


def _written(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
    """Does `x[mask] = value`, where the mask is about the first dims."""
    x, there = call.parts.get("self"), call.event.arguments
    masks = [index for index in call.arguments["indices"] if index is not None]
    mask = known.parts.get(masks[0]) if len(masks) == 1 else None
    if x is None or mask is None or call.arguments.get("accumulate") or there.get("accumulate"):
        return None
    at = [index is not None for index in call.arguments["indices"]].index(True)
    num = len(mask.rows.dims)
    if x.rows.dims[at : at + num] != mask.rows.dims or call.results[0].ndim < at + num:
        return None
    if call.shards["values"].global_shape not in ((), (1,)):
        return None
    dims = [Sharded(call.shards["self"].dims)]
    return _selected(known, call, x, mask, False, call.arguments["values"], x.rows, dims)


def _masked(
    known: KnownIdRanges, call: IdRangeCall, target: str, mask: str, inside: bool, fill: Any
) -> Outcome:
    """Keeps the entries of some ids, and puts a value in place of all others."""
    x, by = call.parts.get(target), call.parts.get(mask)
    if x is None or by is None or len(call.parts) != 2:
        return None
    dims, rows = known.dims(call), call.rows(x)
    if dims is None or rows is None:
        return None
    return _selected(known, call, x, by, inside, fill, rows, dims)


def _selected(
    known: KnownIdRanges,
    call: IdRangeCall,
    x: IdRange,
    mask: IdRange,
    inside: bool,
    fill: Any,
    rows: ShardedTensor,
    dims: list[Sharded],
) -> Outcome:
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


def _looked_up(table: str, index: str) -> Rule:
    """Makes the rule of an operation that picks entries of a table of which ranks have shards."""

    def rule(known: KnownIdRanges, call: IdRangeCall) -> Outcome:
        x, place = call.shards[table], known.index_of(call.arguments[index])
        if place is None or table in call.parts or _counts_otherwise(call.arguments):
            return None
        at, part = place
        if table != "weight":
            at = call.arguments["dim"] % max(len(x.dims), 1) if "dim" in call.arguments else at
        if part.form != OFFSET or part.lower is None or not x.dims:
            return None
        size = Pair(Affine.single(x.local[at]), Affine.single(x.global_shape[at]))
        upper = part.lower.plus(size)
        if known.dim_between(part.lower, upper) != x.dims[at] or part.upper != upper:
            return None
        dims = known.dims(call, {table: _gathered(x, at)})
        rows = _rows_of_lookup(call, x, at, part, index)
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
    call: IdRangeCall, x: ShardedTensor, at: int, part: IdRange, index: str
) -> ShardedTensor | None:
    shape = call.event.results[0][1]
    if call.name == "index.Tensor":
        plain = ShardedTensor.unsharded(x.global_shape)
        indices = [
            shard if shard is None else part.rows if n == at else without_rows(shard.global_shape)
            for n, shard in enumerate(call.shards[index])
        ]
        return call.rows(part, {"self": plain, "indices": indices})
    others = [unsharded(size) for size in x.global_shape]
    dims = (*others[:at], *part.rows.dims, *others[at + 1 :])
    dims = part.rows.dims if call.name == "gather" else dims
    return by_rows(dims, shape) if len(dims) == len(shape) else None


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

STARTS: Final = frozenset({*_COMPARISONS, "sub.Tensor"})

RULES: Final[Mapping[str, Rule]] = {
    **dict.fromkeys(COPIES, _kept),
    **_COMPARISONS,
    "sub.Tensor": _counted,
    "eq.Tensor": _matched,
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

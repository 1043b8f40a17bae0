"""Sharding rules of ATen operations: layouts of results from those of operands.

Operations that depend on sizes, or are very common, have rules here; all others use DTensor's
sharding propagation.
"""

from collections.abc import Collection, Mapping
from typing import Any, Final

import torch

from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.layout import (
    ANY,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    broadcast,
    dims_by_size,
    expand_dims,
    fill,
    merged,
    reshape,
    settled,
    size_of_one_rank,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.ops import indexing, letters
from shardmap_torch.checker.spmd.ops.advice import COMPARED, KEY, NUMBER, PART, STATISTICS, counted
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.ops.reductions import add, average, extremum
from shardmap_torch.checker.spmd.sharded import (
    GATHER,
    MICROBATCHES,
    WRAP,
    Rule,
    Sharded,
    Step,
    shards_of,
)
from shardmap_torch.core.torch_private.engine import OpOverload

aten = torch.ops.aten


def propagate(step: Step) -> list[Sharded]:
    """Returns how each result is sharded.

    Raises:
        UnrelatedError: the results are no shards of those on one device.
    """
    if step.sizes and step.arguments.get("generator") is not None:
        raise UnrelatedError(
            "it draws from a generator, of which each rank may have one with the same seed", KEY
        )
    rule = _rule_of(step.op)
    for name, there in step.unsharded_arguments.items():
        if name in _SIZES.get(rule, ()):
            continue
        raise UnrelatedError(
            f"its argument {name} is {step.arguments[name]} on a rank and {there} on one device",
            STATISTICS if name == "normalized_shape" else _number(step),
        )
    _reject_counted(step, rule)
    return rule(step)


DRAW: Final = "shardmap_torch::threefry"

_COMPARING: Final = overloads("lt.Scalar le.Scalar gt.Scalar ge.Scalar clamp clamp_ clamp_max")


def _number(step: Step) -> str:
    is_of_ids = step.op in _COMPARING and not step.tensors[0].is_floating_point()
    return COMPARED if is_of_ids else NUMBER


def _reject_counted(step: Step, rule: Rule) -> None:
    """Refuses positions that each rank counts by itself, but where they pick its own entries."""
    if rule in (_copied, indexing.unsqueeze):
        return
    for name, value in step.arguments.items():
        counts = any(step_of(dim) is not None for x in shards_of(value) for dim in x.dims)
        if counts and (rule, name) not in _COUNTED:
            is_draw = step.op._schema.name == DRAW
            made = None if is_draw else step.tensors_of(name)[0]
            raise UnrelatedError(*counted(name, is_draw), made)


def _copied(step: Step) -> list[Sharded]:
    (x,) = step.shards
    return [Sharded(x.dims)]


def _pointwise(step: Step) -> list[Sharded]:
    shards = step.shards
    return [Sharded(broadcast(shards, len(global_shape))) for _, global_shape in step.results]


def _listed(step: Step) -> list[Sharded]:
    """Propagates lists of tensors, which are processed position by position."""
    listed = [shards_of(v) for v in step.arguments.values() if isinstance(v, list | tuple)]
    lists = [shards for shards in listed if shards]
    shared = [v for v in step.arguments.values() if isinstance(v, ShardedTensor)]
    found = []
    for index, (_, global_shape) in enumerate(step.results):
        at = index % len(lists[0])
        operands = [*(shards[at] for shards in lists), *shared]
        if any(len(x.global_shape) > len(global_shape) for x in operands):
            raise UnrelatedError("it reduces each tensor of a list", WRAP)
        found.append(Sharded(broadcast(operands, len(global_shape))))
    return found


def _reshaped(step: Step) -> list[Sharded]:
    (x,) = step.shards
    try:
        return [Sharded(reshape(x, global_shape)) for _, global_shape in step.results]
    except UnrelatedError:
        if ANY not in x.dims:
            raise
        if step.zeros:
            return [Sharded(fill(*shapes), of_zeros=True) for shapes in step.results]
        x = settled(x, step.sizes)
        return [Sharded(reshape(x, global_shape)) for _, global_shape in step.results]


def _expanded(step: Step) -> list[Sharded]:
    (x,) = step.shards
    return [Sharded(expand_dims(x, *shapes)) for shapes in step.results]


def _filled(step: Step) -> list[Sharded]:
    return [Sharded(fill(*shapes)) for shapes in step.results]


def _drawn(step: Step) -> list[Sharded]:
    """Lays out independent random numbers: as many as ranks have are a shard of as many of all.

    Any part will do of each dim that has another size on one device, and `dims_by_size` names one.

    Raises:
        UnrelatedError: no axes are left for a dim, and its numbers differ, unlike those of a fill.
    """
    if step.shards and all(ANY not in x.dims for x in step.shards):
        return _pointwise(step)
    found = [dims_by_size(*shapes, step.sizes, step.drawn) for shapes in step.results]
    if any(ANY in dims for dims in found):
        raise size_of_one_rank("a size of what it draws")
    return list(map(Sharded, found))


def _permuted(step: Step) -> list[Sharded]:
    (x,) = step.shards
    order = _order(step.op, step.arguments, len(x.dims))
    return [Sharded(tuple(x.dims[dim] for dim in order))]


def _order(op: OpOverload, arguments: Mapping[str, Any], rank: int) -> list[int]:
    order = list(range(rank))
    if op is aten.permute.default:
        return list(arguments["dims"])
    if op is aten.t.default:
        return order[::-1]
    first, second = arguments["dim0"], arguments["dim1"]
    if rank:
        order[first], order[second] = order[second], order[first]
    return order


def _joined(step: Step) -> list[Sharded]:
    """Propagates a concatenation, along a dim that is unsharded, or of parts sharded alike."""
    shards = [x for x in step.shards if x.global_shape != (0,)]
    rank = len(shards[0].global_shape)
    dim = step.arguments["dim"]
    first = shards[0].dims[dim]
    alike = all(x.dims[dim] == first for x in shards)
    alike = alike and first != ANY and step_of(first) is None
    if not alike and any(x.dims[dim] == ANY or axes_of(x.dims[dim]) for x in shards):
        raise UnrelatedError(f"it joins along dim {dim}, which is sharded", GATHER)
    others = [other for other in range(rank) if other != dim]
    dims = broadcast([x.part(others) for x in shards], rank - 1)
    joined = unsharded(sum(x.global_shape[dim] for x in shards))
    if axes_of(first):
        joined = tuple(merged([(None, len(shards)), *first]))
    return [Sharded((*dims[:dim], joined, *dims[dim:]))]


def _stacked(step: Step) -> list[Sharded]:
    shards = step.shards
    dim, dims = step.arguments["dim"], broadcast(shards, len(shards[0].global_shape))
    return [Sharded((*dims[:dim], unsharded(len(shards)), *dims[dim:]))]


def _sliced(step: Step) -> list[Sharded]:
    (x,) = step.shards
    dim = step.arguments["dim"]
    here = _range(step.arguments, x.local[dim])
    there = _range({**step.arguments, **step.unsharded_arguments}, x.global_shape[dim])
    if here == (0, x.local[dim], 1) and there == (0, x.global_shape[dim], 1):
        return [Sharded(x.dims)]
    if axes_of(x.dims[dim]) or x.dims[dim] == ANY:
        raise UnrelatedError(f"it takes a part of dim {dim}, which is sharded", MICROBATCHES)
    if here != there:
        counts = f"{here[1]} entries of dim {dim} on a rank and {there[1]} on one device"
        raise UnrelatedError(f"it takes {counts}, where it is unsharded", PART)
    return [Sharded((*x.dims[:dim], unsharded(here[1]), *x.dims[dim + 1 :]))]


def _range(arguments: Mapping[str, Any], size: int) -> tuple[int, int, int]:
    """Returns start, length and step of a slice; not a `range`, for which symbols are numbers."""

    def bound(name: str, default: int) -> int:
        at: int | None = arguments[name]
        at = default if at is None else at + size if at < 0 else at
        return min(max(at, 0), size)

    start, step = bound("start", 0), arguments["step"]
    return start, max(bound("end", size) - start + step - 1, 0) // step, step


_GRIDS: Final = letters.each(2)
"""Grids of affine maps, of which torch requires as many as the first size says."""

RULES: Final[Mapping[OpOverload, Rule]] = {
    op: rule
    for rule, names in (
        (_copied, "clone detach alias lift_fresh"),
        (_pointwise, "copy_ copy _to_copy masked_fill.Scalar exponential_ geometric_"),
        (_pointwise, "to.dtype to.dtype_layout to.device to.other"),
        (_pointwise, "masked_fill_.Scalar where.self where.ScalarOther where.ScalarSelf"),
        (_pointwise, "fill_.Scalar fill_.Tensor zero_ zeros_like ones_like full_like empty_like"),
        (_drawn, "rand randn randint randint.low bernoulli bernoulli_.float uniform_ normal_"),
        (_drawn, "native_dropout rand_like randn_like"),
        (_pointwise, "_conj _neg_view _conj_physical real imag masked_fill.Tensor"),
        (_reshaped, "view _unsafe_view reshape _reshape_alias squeeze squeeze.dim"),
        (indexing.unsqueeze, "unsqueeze"),
        (_reshaped, "squeeze.dims view_copy"),
        (_expanded, "expand"),
        (_filled, "zeros ones full empty.memory_format scalar_tensor new_zeros new_ones new_full"),
        (_filled, "new_empty _efficientzerotensor _new_zeros_with_same_feature_meta"),
        (_permuted, "permute t transpose.int"),
        (_joined, "cat"),
        (_stacked, "stack"),
        (_sliced, "slice.Tensor"),
        (extremum("max"), "any any.dim any.dims max.dim _is_any_true"),
        (extremum("min"), "all all.dim all.dims min.dim _is_all_true"),
        (add, "sum sum.dim_IntList"),
        (average, "mean mean.dim"),
        (indexing.read, "index.Tensor _unsafe_index.Tensor"),
        (indexing.write, "index_put index_put_ _unsafe_index_put"),
        (indexing.add_entries, "index_add index_add_ scatter_add scatter_add_"),
        (indexing.reduce_entries, "scatter_reduce.two scatter_reduce_.two"),
        (indexing.select, "select.int unbind.int select_copy.int unbind_copy.int"),
        (indexing.split, "split.Tensor split_with_sizes unsafe_split.Tensor split_copy.Tensor"),
        (indexing.split, "unsafe_split_with_sizes split_with_sizes_copy"),
        (indexing.diagonal, "diagonal diagonal_copy"),
        (indexing.windows, "unfold unfold_copy unfold_backward"),
        (indexing.repeat, "repeat"),
        (letters.convolve, "convolution"),
        (letters.group_norm, "native_group_norm"),
        (letters.batch_norm, "native_batch_norm _native_batch_norm_legit.no_stats"),
        (letters.attend, letters.ATTENTION),
        (letters.product("...pM,...rM->...pr"), "_cdist_forward"),
        (_GRIDS, "affine_grid_generator"),
        *((letters.each(count), names) for count, names in letters.EACH.items()),
        (letters.product("mk,kn->mn"), "mm addmm"),
        (letters.product("bmk,bkn->bmn"), "bmm baddbmm"),
        (letters.product("mk,k->m"), "mv addmv"),
        (letters.product("k,k->"), "dot vdot"),
        (letters.grouped_products, "_grouped_mm"),
        (letters.triangle, "tril tril_ triu triu_"),
        (letters.bags, "_embedding_bag _embedding_bag_forward_only"),
    )
    for op in overloads(names)
}

_SIZES: Final[Mapping[Rule, Collection[str]]] = {
    _reshaped: ("size", "shape", "stride"),
    _expanded: ("size",),
    _filled: ("size",),
    _drawn: ("size",),
    _sliced: ("start", "end"),
    indexing.repeat: ("repeats",),
    indexing.windows: ("input_sizes",),
    _GRIDS: ("size",),
    indexing.split: ("split_size", "split_sizes"),
    letters.convolve: ("groups",),
    letters.group_norm: ("N", "C", "group"),
}
"""Arguments that are sizes, or positions relative to them, and may differ in the two programs."""

_COUNTED: Final[Collection[tuple[Rule, str]]] = (
    (indexing.read, "indices"),
    (indexing.write, "indices"),
)
"""Arguments that may count the entries that each rank has."""

# What torch's reference formulas are written in has no tags.
_POINTWISE_PRIMS: Final = frozenset(
    "abs add convert_element_type cos div eq exp ge gt le log lt maximum minimum mul ne neg pow"
    " rsqrt sin sqrt sub tanh where".split()
)


def _rule_of(op: OpOverload) -> Rule:
    found = RULES.get(op)
    if found is not None:
        return found
    namespace, name = op._schema.name.split("::")
    if torch.Tag.pointwise in op.tags or (namespace == "prims" and name in _POINTWISE_PRIMS):
        return _pointwise
    if op._schema.name.startswith(("aten::_foreach_", "aten::_fused_")):
        return _listed
    return by_dtensor

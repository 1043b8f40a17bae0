"""Sharding rules of ATen operations from DTensor's own sharding propagation.

It is queried for one axis at a time, and only answers that need no data movement are used.
"""

from collections.abc import Hashable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from math import prod
from typing import Any, Final

import torch

from shardmap_torch.checker.ir.fake_results import fake_mode
from shardmap_torch.checker.ir.sizes import hashable_size
from shardmap_torch.checker.rules.infer import draws, signature_of, writes_of
from shardmap_torch.checker.rules.registry import functional
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    Shape,
    ShardedTensor,
    UnrelatedError,
    distinct,
    size_of_one_rank,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import LAYERS, NORM
from shardmap_torch.checker.spmd.ops.losses import IGNORING, is_average
from shardmap_torch.checker.spmd.sharded import WRAP, Sharded, Step
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.scope import outside
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    OpOverload,
    disable_current_modes,
)


@dataclass(frozen=True)
class _Slot:
    """A placeholder for one operand in the arguments of an operation."""

    shape: Shape
    dtype: torch.dtype
    dim: int | None


_AVERAGE: Final = (
    "it averages over a sharded dim, and the mean of a shard is not the mean",
    "take the sum, all_reduce it, and divide by the size on one device: x.shape[dim] * "
    "axis_size(axis).",
)


def by_dtensor(step: Step) -> list[Sharded]:
    """Queries DTensor's rule for each axis, and combines the answers.

    Raises:
        UnrelatedError: as `propagate`.
    """
    step, equal = _named(_laid_out(step))
    shards = step.shards
    bases = {axis: base for x in shards for dim in x.dims for axis, base in dim}
    axes = sorted({axis for x in shards for axis in x.axes}, key=[*step.sizes].index)
    op = _asked_about(step) if axes else step.op
    dims: list[list[Dim]] = [list(map(unsharded, global_shape)) for _, global_shape in step.results]
    partial: list[set[str]] = [set() for _ in step.results]
    means: list[set[str]] = [set() for _ in step.results]
    pending: list[set[tuple[str, str]]] = [set() for _ in step.results]
    for axis in axes:
        if axis in equal:
            for result, dim in enumerate(_kept(op, step, axis, equal[axis])):
                dims[result][dim] = ANY
            continue
        answers = _ask(op, _arguments_for(step, axis), bases[axis])
        if answers is None:
            cut = sorted({x.sharded_by(axis) for x in shards} - {None}, key=str)
            where = f"gather dim {' or '.join(map(str, cut))} over {axis!r} first"
            layer = LAYERS.get(step.op._schema.name.split("::")[1].removeprefix("_"))
            advice = [where, *([layer] if layer else []), "or wrap per-rank code in local_region."]
            raise UnrelatedError(_MOVED, ", ".join(advice))
        if len(answers) < len(step.results):
            raise UnrelatedError("torch does not know how its results are sharded", WRAP)
        for result, answer in enumerate(answers):
            if isinstance(answer, int):
                dims[result][answer] = _passed_on(axis, step, result, answer)
            elif answer == "sum" or (answer == "avg" and is_average(step)):
                partial[result].add(axis)
                means[result] |= {axis} - {axis if answer == "sum" else ""}
            elif answer is not None:
                pending[result].add((axis, _extremum(step.op, answer)))
    columns = zip(dims, partial, pending, means, strict=True)
    return [Sharded(tuple(d), frozenset(p), frozenset(e), frozenset(m)) for d, p, e, m in columns]


def _asked_about(step: Step) -> OpOverload:
    """The operation to ask about: of one that writes its operand, that which gives the result."""
    writes = writes_of(step.op, step.arguments)
    if not writes:
        return step.op
    makes = functional(step.op) if writes == ("self",) else []
    if not makes:
        raise UnrelatedError(
            "nothing is known about what it writes where operands are sharded", WRAP
        )
    return makes[0]


_MOVED: Final = "on sharded operands it does not give shards of the result"
_UNKNOWN: Final = "its result would still have to be combined over the ranks"


def _laid_out(step: Step) -> Step:
    """Lays out dims of equal entries, which any sharding suits, like operands' dims of their size.

    Those of an operand of the same shape come first; no axis shards two dims of a tensor.
    """
    shaped = {_sizes(x.local, x.global_shape): x.dims for x in step.shards if ANY not in x.dims}
    known = {
        _sizes(*pair): dim
        for x in reversed(step.shards)
        for pair, dim in zip(_each(x), x.dims, strict=True)
        if dim != ANY
    }

    def like(value: Any) -> Any:
        if isinstance(value, ShardedTensor) and ANY in value.dims:
            sizes = [_sizes(*pair) for pair in _each(value)]
            others = shaped.get(_sizes(value.local, value.global_shape)) or [
                known.get(each, ANY) for each in sizes
            ]
            pairs = zip(value.dims, others, strict=True)
            dims = tuple(other if own == ANY else own for own, other in pairs)
            found = replace(value, dims=dims)
            return found if len({*found.axes}) == len(found.axes) else value
        return [*map(like, value)] if isinstance(value, list | tuple) else value

    return replace(step, arguments={name: like(v) for name, v in step.arguments.items()})


def _named(step: Step) -> tuple[Step, Mapping[str, Hashable]]:
    """Shards dims of equal entries over axes of their own, one for each pair of sizes.

    What is done with shards of such a dim, and gives shards, gives equal entries for equal ones.
    """
    names: dict[Hashable, str] = {}

    def named(value: Any) -> Any:
        if isinstance(value, ShardedTensor) and ANY in value.dims:
            places = [at for at, dim in enumerate(value.dims) if dim == ANY]
            sizes = [_sizes(*_each(value)[at]) for at in places]
            if len({*sizes}) < len(sizes) or draws(step.op, step.arguments):
                raise size_of_one_rank()
            dims = [*value.dims]
            for at, pair in zip(places, sizes, strict=True):
                axis = names.setdefault(pair, f"equal entries {len(names)}")
                dims[at] = ((axis, 2), *unsharded(value.local[at]))
            return replace(value, dims=tuple(dims))
        return [*map(named, value)] if isinstance(value, list | tuple) else value

    arguments = {name: named(value) for name, value in step.arguments.items()}
    sizes = {**step.sizes, **dict.fromkeys(names.values(), 2)}
    found = replace(step, arguments=arguments, sizes=sizes)
    return found, {axis: pair for pair, axis in names.items()}


def _kept(op: OpOverload, step: Step, axis: str, sizes: Hashable) -> list[int]:
    """Returns the dim of each result whose entries are as equal as those of a dim of operands."""
    try:
        answers = _ask(op, _arguments_for(step, axis), 2)
    except UnrelatedError as error:
        raise size_of_one_rank() from error
    found = [at for at in answers or () if isinstance(at, int)]
    pairs = zip(found, step.results, strict=False)
    made = [_sizes(here[at : at + 1], there[at : at + 1]) for at, (here, there) in pairs]
    if len(found) != len(step.results) or any(each != sizes for each in made):
        raise size_of_one_rank()
    return found


def _each(x: ShardedTensor) -> list[tuple[Shape, Shape]]:
    return [((mine,), (all_,)) for mine, all_ in zip(x.local, x.global_shape, strict=True)]


def _sizes(local: Shape, global_shape: Shape) -> Hashable:
    return tuple(map(hashable_size, local)), tuple(map(hashable_size, global_shape))


def _extremum(op: OpOverload, answer: str) -> str:
    """Returns the reductions pending over ranks that are not sums."""
    if answer in EXTREMA:
        return answer
    fix = NORM if "norm" in op._schema.name else WRAP
    raise UnrelatedError(*(_AVERAGE if answer == "avg" else (_UNKNOWN, fix)))


def _passed_on(axis: str, step: Step, result: int, dim: int) -> Dim:
    """Returns how a result's dim is sharded: like the operand dim that it comes from."""
    found = distinct(x.dims[at] for x in step.shards if (at := x.sharded_by(axis)) is not None)
    global_shape = step.results[result][1][dim]
    if len(found) != 1 or prod(base for _, base in found[0]) != global_shape:
        raise UnrelatedError("it does not keep the sharded dim as it is", WRAP)
    return found.pop()


def _arguments_for(step: Step, axis: str) -> tuple[tuple[Any, ...], tuple[tuple[str, Any], ...]]:
    """Returns positional and keyword arguments as one axis sees them, sharded over no other."""
    tensors = iter(step.tensors)

    def seen(value: Any) -> Any:
        if isinstance(value, ShardedTensor):
            dim, shape = value.sharded_by(axis), list(value.local)
            if dim is not None:
                shape[dim] *= step.sizes[axis]
            return _Slot(tuple(shape), next(tensors).dtype, dim)
        if isinstance(value, list | tuple):
            return tuple(map(seen, value))
        return value

    arguments = {name: seen(value) for name, value in step.arguments.items()}
    defaults = signature_of(step.op).defaults
    given = [a for a in step.op._schema.arguments if a.name in arguments]
    is_default = [
        a.name in defaults and arguments[a.name] == _hashable(defaults[a.name]) for a in given
    ]
    positional = [i for i, a in enumerate(given) if not a.kwarg_only]
    last = max((i for i in positional if not is_default[i]), default=-1)
    args = tuple(arguments[given[i].name] for i in positional if i <= last)
    kwargs = tuple(
        (a.name, arguments[a.name])
        for i, a in enumerate(given)
        if a.kwarg_only and not is_default[i]
    )
    return args, kwargs


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _ask(op: OpOverload, arguments: Any, size: int) -> tuple[int | str | None, ...] | None:
    """Returns what `_answered` does, and remembers it where no size is a symbol."""
    try:
        return _remembered(op, arguments, size)
    except TypeError:  # a symbol has no hash
        return _answered(op, arguments, size)


_REDUCTION: Final = 3
"""Position of the argument that says how a loss is reduced: 1 averages, and 2 sums."""


def _answered(op: OpOverload, arguments: Any, size: int) -> tuple[int | str | None, ...] | None:
    """Returns for each result its sharded dim, its pending reduction ("sum"), or None for neither.

    None for all where torch would move data first.

    Raises:
        UnrelatedError: it does not know the operation.
    """
    args, kwargs = arguments
    answers = _propagated(op, args, kwargs, size)
    if answers is None and op in IGNORING and args[_REDUCTION] == 1:
        # Since shards may leave out different numbers of entries, torch 2.14 gathers these first.
        # `is_average` and a look at the targets see to that here, where the sum is an average.
        total = (*args[:_REDUCTION], 2, *args[_REDUCTION + 1 :])
        value, *weight = _propagated(op, total, kwargs, size) or (None,)
        answers = ("avg", *weight) if value == "sum" else None
    return answers


def _has_symbols(value: Any) -> bool:
    """Returns whether a size in the arguments of an operation is a symbol."""
    if isinstance(value, _Slot):
        return any(isinstance(size, torch.SymInt) for size in value.shape)
    return isinstance(value, tuple) and any(map(_has_symbols, value))


def _propagated(
    op: OpOverload, args: Any, kwargs: Any, size: int
) -> tuple[int | str | None, ...] | None:
    """Returns what torch answers, or None where it would move data first."""
    # Outside of the body and its modes: what torch computes and asks for here is not the body's.
    with outside(), DisableTorchFunction(), disable_current_modes():
        try:
            schema = _schema(op, args, dict(kwargs), _mesh(size))
            # Under a mode, torch 2.14 does not remember what moves cost by sizes, which it cannot
            # where these are symbols.
            with fake_mode() if _has_symbols(args) else nullcontext():
                found = _propagator().propagate_op_sharding_non_cached(schema)
        except Exception as error:
            raise UnrelatedError("torch does not know how its results are sharded", WRAP) from error
    if found.needs_redistribute:
        return None
    specs = found.output_spec
    return tuple(map(_answer, specs if isinstance(specs, list | tuple) else [specs]))


_remembered: Final = lru_cache(maxsize=8192)(_answered)


def _answer(spec: Any) -> int | str | None:
    if spec is None:
        return None
    (placement,) = spec.placements
    if placement.is_replicate():
        return None
    if type(placement).__name__ == "Shard":
        return int(placement.dim)
    # A sum is one only if it is the plain kind: norms and masked lookups are subclasses.
    return str(placement.reduce_op) if type(placement).__name__ == "Partial" else "?"


@cache
def _propagator() -> Any:
    from shardmap_torch.core.torch_private.dtensor import sharding_propagator

    return sharding_propagator()


@cache
def _mesh(size: int) -> Any:
    """Returns a DeviceMesh of that size without processes."""
    from torch.distributed.device_mesh import DeviceMesh

    return DeviceMesh("cpu", torch.arange(size), _init_backend=False, _rank=0)


def _schema(op: OpOverload, args: Any, kwargs: Mapping[str, Any], mesh: Any) -> Any:
    from shardmap_torch.core.torch_private.dtensor import OpSchema

    def spec(value: Any) -> Any:
        if isinstance(value, _Slot):
            return _spec(value, mesh)
        # torch writes lists as lists.
        return [spec(item) for item in value] if isinstance(value, tuple) else value

    info = _propagator().op_to_schema_info.get(op)
    return OpSchema(
        op,
        tuple(map(spec, args)),
        {name: spec(value) for name, value in kwargs.items()},
        schema_info=info,
    )


def _spec(slot: _Slot, mesh: Any) -> Any:
    from torch.distributed.tensor import Replicate, Shard

    from shardmap_torch.core.torch_private.dtensor import DTensorSpec, TensorMeta

    like = torch.empty(slot.shape, dtype=slot.dtype, device="meta")
    placement = Replicate() if slot.dim is None else Shard(slot.dim)
    meta = TensorMeta(like.shape, like.stride(), slot.dtype)
    return DTensorSpec(mesh, (placement,), tensor_meta=meta)

"""Sharding rules of reads and writes at positions, and of views of parts of a dim."""

from collections.abc import Sequence
from dataclasses import replace

import torch

from shardmap_torch.checker.spmd.layout import (
    ANY,
    Dim,
    ShardedTensor,
    UnrelatedError,
    agreed,
    axes_of,
    broadcast,
    fill,
    merged,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.advice import LAYERS, NUMBER, counted
from shardmap_torch.checker.spmd.ops.dtensor_rules import by_dtensor
from shardmap_torch.checker.spmd.sharded import (
    GATHER,
    MICROBATCHES,
    POSITION,
    WRAP,
    Sharded,
    Step,
    shards_of,
)


def read(step: Step) -> list[Sharded]:
    """Lays out `x[:, ids]`: the dims of the indices take the place of those that they index."""
    x, indices = step.arguments["self"], step.arguments["indices"]
    places = [dim for dim, index in enumerate(indices) if isinstance(index, ShardedTensor)]
    found = _resolved(step)
    rank = max(len(index.global_shape) for index in found)
    kept = [x.dims[dim] for dim in range(len(x.dims)) if dim not in places]
    return [Sharded(tuple(_in_place(places, broadcast(found, rank), kept)))]


def write(step: Step) -> list[Sharded]:
    """Lays out `x[:, ids] = values`, which leaves the layout of `x` as it is.

    With `accumulate`, of sharded entries, each rank adds its own to zeros.
    """
    x, indices, values = (step.arguments[name] for name in ("self", "indices", "values"))
    places = [dim for dim, index in enumerate(indices) if isinstance(index, ShardedTensor)]
    if any(x.dtype in (torch.bool, torch.uint8) for x in step.tensors_of("indices")):
        return _masked(x, shards_of(indices)[0], values, places)
    found = _resolved(step)
    rank = max(len(index.global_shape) for index in found)
    own = [
        index.dims
        for index, before in zip(found, shards_of(indices), strict=True)
        if any(step_of(dim) is not None for dim in before.dims)
    ]
    picked, added = broadcast(found, rank), frozenset[str]()
    for at, dim in enumerate(picked):
        is_elsewhere = axes_of(dim) and not any(_at(dims, at - rank) == dim for dims in own)
        if is_elsewhere and step.arguments.get("accumulate"):
            _require_zeros(step, dim)
            added |= {*axes_of(dim)}
        elif is_elsewhere:
            raise UnrelatedError(
                "it writes at positions that are sharded, so that each rank writes some of the "
                "entries only",
                "gather the positions and the values first, with all_gather.",
            )
    kept = [x.dims[dim] for dim in range(len(x.dims)) if dim not in places]
    _require_like(values, _in_place(places, picked, kept))
    return [Sharded(x.dims, added)]


def add_entries(step: Step) -> list[Sharded]:
    """Lays out `index_add` and `scatter_add`: of sharded entries, each rank adds its own to zeros.

    Raises:
        UnrelatedError: it adds them to other values, of which each rank has a copy.
    """
    x, index = step.arguments["self"], step.arguments["index"]
    of_rows = "source" in step.arguments
    source = step.arguments["source" if of_rows else "src"]
    dim = step.arguments["dim"]
    listed = index.dims[0 if of_rows else dim] if index.dims and source.dims else ()
    axes = frozenset(axes_of(listed))
    if not axes:
        return by_dtensor(step)
    _require_all(x, dim)
    agreed([listed, source.dims[dim]], f"dim {dim}")
    _require_zeros(step, listed)
    return [Sharded(_beside(dim, x, source, *[index] * (not of_rows)), axes)]


def reduce_entries(step: Step) -> list[Sharded]:
    """Lays out `scatter_reduce` along a dim that is unsharded: each rank has all."""
    operands, dim = step.shards, step.arguments["dim"]
    for each in operands:
        _require_all(each, dim)
    return [Sharded(_beside(dim, *operands))]


def _beside(dim: int, x: ShardedTensor, *others: ShardedTensor) -> tuple[Dim, ...]:
    """Returns the dims of `x`, of which all but one must be those of the others, too."""
    return tuple(
        mine if at == dim else agreed([mine, *(each.dims[at] for each in others)], f"dim {at}")
        for at, mine in enumerate(x.dims)
    )


def _require_zeros(step: Step, dim: Dim) -> None:
    if "self" not in step.zeros:
        axis = min(axes_of(dim))
        raise UnrelatedError(
            f"it adds entries that are sharded over {axis!r} to values that every rank has",
            f"add them to zeros, all_reduce that over {axis!r}, and then add the values.",
        )


def _at(dims: Sequence[Dim], index: int) -> Dim | None:
    return dims[index] if len(dims) >= -index else None


def _masked(
    x: ShardedTensor, mask: ShardedTensor, values: ShardedTensor, places: Sequence[int]
) -> list[Sharded]:
    """One value wherever a mask is true, which is sharded like what is written."""
    at, *more = places
    if more or values.global_shape not in ((), (1,)):
        raise UnrelatedError(
            "where a mask is true it writes values of which each rank has as many as it needs",
            "write one value, or use torch.where(mask, values, x).",
        )
    if mask.dims != x.dims[at : at + len(mask.dims)] or ANY in mask.dims:
        raise UnrelatedError("the mask is not sharded like what it masks", GATHER)
    return [Sharded(x.dims)]


def _require_like(values: ShardedTensor, dims: Sequence[Dim]) -> None:
    """Requires values that can be expanded to these dims without moving any.

    Raises:
        UnrelatedError: they are sharded in another way.
    """
    for at in range(1, len(values.dims) + 1):
        if ANY in values.dims or (values.global_shape[-at] != 1 and values.dims[-at] != dims[-at]):
            raise UnrelatedError(
                "the values are not sharded like the entries that they are written to",
                "convert them first, with convert(x, axis, src=R, dst=V, dim=...), or gather them.",
            )


def _resolved(step: Step) -> list[ShardedTensor]:
    """The indices; one that counts a rank's own entries of a dim is sharded as that dim is.

    Raises:
        UnrelatedError: another one picks from a sharded dim, or counts entries of another tensor.
    """
    x, indices = step.arguments["self"], step.arguments["indices"]
    found: list[ShardedTensor] = []
    for dim, index in enumerate(indices):
        if not isinstance(index, ShardedTensor):
            continue
        own = [at for at, each in enumerate(index.dims) if step_of(each) is not None]
        if own and _counts(x, dim, index, own[0]):
            dims = tuple(x.dims[dim] if at in own else each for at, each in enumerate(index.dims))
            found.append(replace(index, dims=dims))
        elif own and unsharded(x.global_shape[dim]) == x.dims[dim]:
            made = step.tensors_of("indices")[len(found)]
            raise UnrelatedError(*counted("index", False), made)
        elif own or x.dims[dim] == ANY or axes_of(x.dims[dim]):
            advice = f"{LAYERS['index']}; or {WRAP}" if dim == 0 else WRAP
            raise UnrelatedError("it picks entries along a dim that is sharded", advice)
        else:
            found.append(index)
    return found


def _counts(x: ShardedTensor, dim: int, index: ShardedTensor, at: int) -> bool:
    """Returns whether an index counts all entries of a dim of which the ranks have shards."""
    sizes = index.local[at], index.global_shape[at]
    return (
        step_of(index.dims[at]) == 1
        and sizes == (x.local[dim], x.global_shape[dim])
        and (x.dims[dim] == ANY or bool(axes_of(x.dims[dim])))
        and all(size == 1 for other, size in enumerate(index.global_shape) if other != at)
    )


def _in_place(places: Sequence[int], picked: Sequence[Dim], kept: Sequence[Dim]) -> list[Dim]:
    """Puts the dims of the indices where torch does: in place of adjacent ones, else in front."""
    adjacent = [*places] == list(range(places[0], places[0] + len(places)))
    front = places[0] if adjacent else 0
    return [*kept[:front], *picked, *kept[front:]]


# ------------------------------------------------------------------------ parts of a dim


def _require_all(x: ShardedTensor, dim: int, advice: str = MICROBATCHES) -> int:
    if not x.dims:
        raise UnrelatedError("it takes the one entry of a number apart")
    dim %= len(x.dims)
    if axes_of(x.dims[dim]) or x.dims[dim] == ANY or step_of(x.dims[dim]) is not None:
        raise UnrelatedError(f"it takes dim {dim} apart, which is sharded", advice)
    return dim


def select(step: Step) -> list[Sharded]:
    """Lays out `x[0]` and `x.unbind()`: one dim, which must be unsharded, is gone."""
    (x,) = step.shards
    advice = POSITION if "index" in step.arguments else MICROBATCHES
    dim = _require_all(x, step.arguments["dim"], advice)
    return [Sharded((*x.dims[:dim], *x.dims[dim + 1 :])) for _ in step.results]


def split(step: Step) -> list[Sharded]:
    """Lays out parts of a dim: whole blocks of it, where it is sharded within each block."""
    (x,) = step.shards
    dim = step.arguments["dim"]
    digits = x.dims[dim] if x.dims else ()
    block = digits[1:] if digits and digits[0][0] is None else ()
    if not axes_of(block):
        dim, block = _require_all(x, dim), ()
    blocks = digits[0][1] if block else x.local[dim]
    unit, unit_there = x.local[dim] // blocks, x.global_shape[dim] // blocks
    found = []
    for shape, global_shape in step.results:
        count = global_shape[dim] // unit_there
        if (shape[dim], global_shape[dim]) != (count * unit, count * unit_there):
            raise UnrelatedError(
                f"a part has {shape[dim]} entries of dim {dim} on a rank and {global_shape[dim]} "
                f"on one device, where {unit} stand for {unit_there}",
                NUMBER,
            )
        part = tuple(merged([(None, count), *block]))
        found.append(Sharded((*x.dims[:dim], part, *x.dims[dim + 1 :])))
    return found


def diagonal(step: Step) -> list[Sharded]:
    """Lays out a diagonal of two dims, which must be unsharded."""
    (x,) = step.shards
    whole = [_require_all(x, step.arguments[name]) for name in ("dim1", "dim2")]
    ((_, global_shape),) = step.results
    kept = [each for dim, each in enumerate(x.dims) if dim not in whole]
    return [Sharded((*kept, unsharded(global_shape[-1])))]


def windows(step: Step) -> list[Sharded]:
    """Lays out windows of a dim, which must be unsharded, in a last one; or, backward, that dim."""
    (x,), ((_, shape),) = step.shards, step.results
    rank = min(len(x.dims), len(shape))
    dim = step.arguments.get("dim", step.arguments.get("dimension")) % max(rank, 1)
    for whole in (dim, *range(rank, len(x.dims))):
        _require_all(x, whole)
    dims = [unsharded(n) if at in (dim, rank) else x.dims[at] for at, n in enumerate(shape)]
    return [Sharded(tuple(dims))]


def unsqueeze(step: Step) -> list[Sharded]:
    """Lays out a tensor with a dim of size 1 put in."""
    (x,) = step.shards
    dim = step.arguments["dim"]
    return [Sharded((*x.dims[:dim], (), *x.dims[dim:]))]


def repeat(step: Step) -> list[Sharded]:
    """Lays out copies side by side: of one entry they are equal entries, as `expand` makes them.

    Those of a sharded dim are blocks, within each of which it is sharded.
    """
    (x,) = step.shards
    counts, ((local, global_shape),) = step.arguments["repeats"], step.results
    there = step.unsharded_arguments.get("repeats", counts)
    front = len(global_shape) - len(x.dims)
    found = [*fill(local, global_shape)]
    for at, (mine, all_) in enumerate(zip(counts, there, strict=True)):
        dim = x.dims[at - front] if at >= front else ()
        if dim == () and (mine, all_) != (1, 1):
            continue
        if mine != all_:
            raise UnrelatedError(
                f"it copies dim {at - front} {mine} times on a rank and {all_} times on one device",
                NUMBER,
            )
        if mine != 1 and (dim == ANY or step_of(dim) is not None):
            _require_all(x, at - front)
        found[at] = dim if mine == 1 else tuple(merged([(None, mine), *dim]))
    return [Sharded(tuple(found))]

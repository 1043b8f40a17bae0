"""Operations that divide rows into microbatches, or put these together again."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.checker.ir.sizes import hashable_size
from shardmap_torch.checker.spmd.batches.chunks import CHUNKS, VIEWS, divided, undivided
from shardmap_torch.checker.spmd.batches.term_store import TermStore
from shardmap_torch.checker.spmd.batches.terms import ALL, Entry, Rearranged, Term
from shardmap_torch.checker.spmd.layout import (
    EACH,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    reshape,
    unsharded,
)
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded, Step
from shardmap_torch.core.torch_private.engine import OpOverload

aten = torch.ops.aten


def rearrange(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    """Lays out microbatches, or the rows of all; None where an operation makes neither.

    Raises:
        UnrelatedError: it divides a microbatch again.
    """
    rule = _RULES.get(step.op)
    return None if rule is None else rule(store, step, call)


def _chunks_of(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    x = step.arguments["self"]
    dim = call.arguments["dim"] % len(x.dims)
    axes = axes_of(x.dims[dim])
    leading = x.dims[dim][: len(axes)]
    if not axes or EACH in axes or axes_of(leading) != axes:
        return None
    here = CHUNKS[step.op](call.arguments, x.local[dim])
    there = CHUNKS[step.op](call.event.arguments, x.global_shape[dim])
    if here is None or there is None or here.key != there.key or here.size == there.size:
        return None
    expression = store.number(("chunk", _begin(store, call.arguments["self"]), dim, here.count))
    dims = (*x.dims[:dim], (*leading, *unsharded(here.size)), *x.dims[dim + 1 :])
    terms = [Term(here.count, axes, frozenset({i}), expression, "rows") for i in here.indices]
    return Rearranged([Sharded(dims)] * len(terms), [Entry(expression, p) for p in terms])


def _viewed(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    """Lays out a view that divides a dim, or has the rows of all microbatches in one."""
    tensor, ((local, there),) = call.arguments["self"], step.results
    x, term = step.arguments["self"], store.term_of(tensor)
    if term is not None and EACH in x.axes and term.state == "rows":
        dims = reshape(x, there)
        joined = tuple(undivided(dim, term.axes) for dim in dims)
        rows = Entry(store.number(("rows", store.expression_of(tensor))), None)
        return Rearranged([Sharded(joined)], [rows]) if joined != dims else None
    found = divided(x, local, there)
    if found is None:
        return None
    dim = next(n for n, each in enumerate(found) if EACH in axes_of(each))
    expression = store.number(("divided", _begin(store, tensor), *map(hashable_size, local)))
    term = Term(local[dim], axes_of(x.dims[dim]), ALL, expression, "rows")
    return Rearranged([Sharded(found)], [Entry(expression, term)])


def _begin(store: TermStore, x: Tensor) -> int:
    """Returns the expression of the tensor that is divided."""
    if store.term_of(x) is not None:
        raise UnrelatedError(
            "it divides a microbatch again", "divide the batch once, into all microbatches."
        )
    store.is_active = True
    expression = store.expression_of(x)
    store.put(x, Entry(expression, None))
    return expression


def _all_in_order(store: TermStore, tensors: Sequence[Tensor]) -> tuple[Term, ShardedTensor] | None:
    """Returns the first one's, if they are one expression of all microbatches, in order."""
    terms = [store.term_of(x) for x in tensors]
    first, shard = terms[0], store.notes.find_any(tensors[0])
    if first is None or shard is None or first.indices == ALL:
        return None
    expected = [replace(first, indices=frozenset({i})) for i in range(first.count)]
    if terms != expected or not all(store.are_alike(tensors[0], x) for x in tensors):
        return None
    return first, shard


def _concatenated(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    found = _all_in_order(store, call.arguments["tensors"]) if store.is_active else None
    if found is None or found[0].state != "rows":
        return None
    first, x = found
    dim = call.arguments["dim"] % len(x.dims)
    digits = x.dims[dim]
    leading = digits[: len(first.axes)]
    if axes_of(leading) != first.axes or axes_of(digits) != first.axes:
        return None
    rest = unsharded(x.local[dim] * first.count)
    dims = (*x.dims[:dim], (*leading, *rest), *x.dims[dim + 1 :])
    return Rearranged([Sharded(dims)], [Entry(store.number(("rows", first.expression, dim)), None)])


def _stacked(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    found = _all_in_order(store, call.arguments["tensors"]) if store.is_active else None
    if found is None:
        return None
    first, x = found
    dim = call.arguments["dim"] % (len(x.dims) + 1)
    expression = store.number(("stack", first.expression, dim))
    term = replace(first, indices=ALL, expression=expression)
    dims = (*x.dims[:dim], ((EACH, first.count),), *x.dims[dim:])
    return Rearranged([Sharded(dims)], [Entry(expression, term)])


def _taken(store: TermStore, step: Step, call: PairedCall) -> Rearranged | None:
    """Lays out microbatches that lie along a dim, each by itself."""
    x, term = step.arguments["self"], store.term_of(call.arguments["self"])
    dim = call.arguments["dim"] % max(len(x.dims), 1)
    index = call.arguments.get("index")
    if term is None or x.dims[dim] != ((EACH, term.count),):
        return None
    if index != call.event.arguments.get("index"):
        return None
    indices = [*range(term.count)] if index is None else [index % term.count]
    expression = store.number(("entry", term.expression, dim))
    each = Sharded((*x.dims[:dim], *x.dims[dim + 1 :]))
    terms = [replace(term, indices=frozenset({i}), expression=expression) for i in indices]
    return Rearranged([each] * len(terms), [Entry(expression, one) for one in terms])


_RULES: Final[Mapping[OpOverload, Callable[[TermStore, Step, PairedCall], Rearranged | None]]] = {
    **dict.fromkeys(CHUNKS, _chunks_of),
    **dict.fromkeys(VIEWS, _viewed),
    aten.cat.default: _concatenated,
    aten.stack.default: _stacked,
    aten.select.int: _taken,
    aten.unbind.int: _taken,
}

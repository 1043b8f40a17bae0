"""Loops over a dim that ranks share: `for w in stack`, `x.split(n)`, `x[:, e] for e in range(n)`.

A rank takes its own items one by one, and one device those of all ranks. A value that depends on
item i of each rank is compared with that of item i on one device, whose steps with the other
items must be the same (`Repeats`). It is each rank's own, and goes with other values that are equal
on the ranks, or depend on the same item. Once the same expression of all items has been added up,
ranks have addends of the sum on one device; stacked or joined in order it is sharded.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.spmd.align import Alignment
from shardmap_torch.checker.spmd.batches.repeats import Repeats, Taken, taken
from shardmap_torch.checker.spmd.batches.term_store import JOIN, TermStore
from shardmap_torch.checker.spmd.batches.terms import Entry, Term, shown
from shardmap_torch.checker.spmd.layout import (
    ANY,
    EACH,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    is_stacked,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import Ref
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.sums import NO_AXES, Sums
from shardmap_torch.checker.spmd.values.positions import Pair

aten = torch.ops.aten

_COMPARISONS: Final = (aten.eq.Tensor, aten.ne.Tensor)
"""Operations by which loops pick what belongs to an item, before they take it."""


class Items:
    """Lays out the items that loops take from a dim, and what these are joined to."""

    def __init__(self, store: TermStore, alignment: Alignment, has_other_ranks: bool) -> None:
        """Starts with no loop; `has_other_ranks` is as for `Repeats`."""
        self.store, self._notes, self._alignment = store, store.notes, alignment
        self._repeats = Repeats(alignment, has_other_ranks)
        self._is_active = False

    def advance(self, name: Any, arguments: Mapping[str, Any]) -> None:
        """Skips what one device does with other ranks' items, where the next step is not that."""
        if not self._is_active:
            return
        self._repeats.read()
        event = self._alignment.next_of(name)
        try:
            if event is not None:
                for key, value in arguments.items():
                    self._notes.layouts(value, event.arguments.get(key), key, takes_stacks=True)
                return
        except UnrelatedError:
            pass
        self._repeats.skip()

    def lay_out(self, call: PairedCall) -> bool:
        """Notes the items that a step takes, or what it joins them to; False for other steps."""
        if call.op in (aten.stack.default, aten.cat.default):
            return self._is_active and self._join(call)
        found = self._taken(call)
        if found is None:
            return False
        shard, here, there = found
        x, at = call.arguments["self"], here.dim
        self.store.is_active = self._is_active = True
        own = self.store.expression_of(x)
        self.store.put(x, Entry(own, None))
        expression = self.store.number(("item", own, at, here.size))
        count = shard.local[at] // max(here.size, 1)
        term = Term(count, axes_of(shard.dims[at]), frozenset(), expression, "item")
        self._repeats.note_source(call.event.arguments["self"], there, shard.global_shape, term)
        left = [unsharded(here.size)] if here.size else []
        dims = (*shard.dims[:at], *left, *shard.dims[at + 1 :])
        places = zip(call.results, call.event.results, here.indices, strict=False)
        for result, (number, shape), index in places:
            self._notes.note(result, number, fitted(dims, tuple(result.shape), shape))
            self.store.put(result, Entry(expression, replace(term, indices=frozenset({index}))))
        return True

    def reject(self, call: PairedCall) -> None:
        """Requires that no operand depends on items.

        Raises:
            UnrelatedError: one does.
        """
        for term in map(self.store.term_of, call.read if self._is_active else ()):
            if term is not None and term.is_item:
                raise UnrelatedError(f"it is about ids of a rank's term, and {shown(term)}", JOIN)

    def reject_move(self, axes: Sequence[str], x: Tensor) -> None:
        """Requires that a collective does not go over the axes whose ranks take items.

        Raises:
            UnrelatedError: it does.
        """
        term = self.store.term_of(x) if self._is_active else None
        if term is not None and term.is_item and not set(axes).isdisjoint(term.axes):
            raise UnrelatedError(f"its operand depends on {shown(term)}", JOIN)

    def adopt(self, call: PairedCall, pair_of: Callable[[Tensor], Pair | None]) -> None:
        """Takes positions `axis_index(axis) * n + i` among the operands for those of items."""
        if not self._is_active and call.op not in _COMPARISONS:
            return
        for name, x in call.arguments.items():
            ref = call.event.arguments.get(name)
            if not isinstance(x, Tensor) or not isinstance(ref, Ref) or x.dtype != torch.int64:
                continue
            pair = pair_of(x) if self._notes.sums(x).loose else None
            term = None if pair is None else self._counted(pair)
            if term is not None:
                self.store.is_active = self._is_active = True
                self.store.put(x, Entry(term.expression, term))
                self._notes.set_sums(x, replace(self._notes.sums(x), loose=NO_AXES))
                self._repeats.note_position(ref, term)

    def _counted(self, pair: Pair) -> Term | None:
        """Returns the item that a number is the position of: item i of rank r is r * n + i."""
        own = {axis: by for axis, by in pair.here.axes.items() if by}
        index, count = pair.here.base, next(iter(own.values()), 0)
        if len(own) != 1 or any(pair.there.axes.values()) or pair.here.shape or pair.there.shape:
            return None
        if index != pair.there.base or not 0 <= index < count or own.keys() - self._notes.sizes:
            return None
        expression = self.store.number(("position", *own.items()))
        return Term(count, tuple(own), frozenset({index}), expression, "item")

    def _taken(self, call: PairedCall) -> tuple[ShardedTensor, Taken, Taken] | None:
        """Returns the operand of a step that takes items, and those of a rank and of one device."""
        x, ref, dim = (
            call.arguments.get("self"),
            call.event.arguments.get("self"),
            call.arguments.get("dim"),
        )
        if not isinstance(x, Tensor) or not isinstance(ref, Ref) or not isinstance(dim, int):
            return None
        shard = self._notes.shard_of(x, ref)
        if shard is None or not shard.dims or is_stacked(shard.dims) or self._notes.sums(x).loose:
            return None
        at = dim % len(shard.dims)
        axes = axes_of(shard.dims[at])
        if not axes or EACH in axes or axes_of(shard.dims[at][: len(axes)]) != axes:
            return None
        here = taken(call.op, call.arguments, at, shard.local[at])
        there = taken(call.op, call.event.arguments, at, shard.global_shape[at])
        if here is None or there is None or here.size != there.size:
            return None
        if here.indices != there.indices[: len(here.indices)] or self.store.term_of(x) is not None:
            return None
        return shard, here, there

    def _join(self, call: PairedCall) -> bool:
        tensors, refs = call.arguments["tensors"], call.event.arguments["tensors"]
        first, shard = self.store.term_of(tensors[0]), self._notes.find_any(tensors[0])
        if first is None or shard is None or not first.is_item:
            return False
        terms = [self.store.term_of(x) for x in tensors]
        there = [self._repeats.entry_of(ref) for ref in refs]
        alike = all(self.store.are_alike(tensors[0], x) for x in tensors)
        alike &= len({ref.flows for ref in refs}) == 1
        is_all = terms == _each(first, first.count)
        if not (is_all and alike) or there != _each(first, self._count_all(first)):
            if {term and term.indices for term in terms} == {first.indices}:
                return False
            raise UnrelatedError("it joins other items of a sharded dim than all, in order", JOIN)
        dim, digits = call.arguments["dim"], self._digits(first)
        dims = [*shard.dims]
        if call.op is aten.stack.default:
            dim %= len(dims) + 1
            dims.insert(dim, (*digits, *unsharded(first.count)))
        else:
            dim %= len(dims)
            if dims[dim] == ANY or axes_of(dims[dim]) or step_of(dims[dim]) is not None:
                return False
            dims[dim] = (*digits, *unsharded(first.count * shard.local[dim]))
        ((number, shape),), (result,) = call.event.results, call.results
        self._notes.note(result, number, fitted(dims, tuple(result.shape), shape))
        self._notes.set_sums(result, self._notes.sums(tensors[0]))
        expression = self.store.number(("joined", call.op, first.expression, dim))
        self.store.put(result, Entry(expression, None))
        return True

    def note_results(self, results: Sequence[Tensor]) -> None:
        """Notes what results are of items, on ranks and on one device."""
        if not self._is_active:
            return
        terms = [self.store.term_of(result) for result in results]
        self._repeats.note_terms([term if term and term.is_item else None for term in terms])
        for result, term in zip(results, terms, strict=True):
            sums = self._notes.sums(result)
            if term is not None and term.is_item and sums.loose:
                self._notes.set_sums(result, replace(sums, loose=sums.loose - {*term.axes}))

    def finish(
        self, follow: Callable[[Iterable[int], int], None], tensor: Tensor, ref: Ref
    ) -> None:
        """Takes what is the sum of all of a rank's items for an addend, if `ref` is that of all.

        Args:
            follow: is called with numbers on one device, and with that of their sum.
            tensor: a tensor of the ranks.
            ref: what stands in its place on one device.
        """
        term = self.store.term_of(tensor) if self._is_active else None
        if term is None or not term.is_item or len(term.indices) < term.count:
            return
        shard, there = self._notes.find_any(tensor), self._repeats.entry_of(ref)
        if shard is None or not set(term.axes).isdisjoint(shard.axes):
            return  # it is also the operand that the items are taken from
        everything = frozenset(range(self._count_all(term)))
        if there != replace(term, indices=everything):
            return
        sums: Sums = self._notes.sums(tensor)
        follow(self._notes.numbers_of(tensor), self._notes.canonical(ref))
        self._notes.overwrite(tensor, ref.number, shard)
        self._notes.set_sums(tensor, replace(sums, partial=sums.partial | {*term.axes}))
        self.store.put(tensor, Entry(self.store.number(("all", term.expression)), None))

    def _count_all(self, term: Term) -> int:
        return term.count * prod(base for _, base in self._digits(term))

    def _digits(self, term: Term) -> tuple[tuple[str, int], ...]:
        return tuple([(axis, self._notes.sizes[axis]) for axis in term.axes])


def _each(term: Term, count: int) -> list[Term]:
    return [replace(term, indices=frozenset({index})) for index in range(count)]

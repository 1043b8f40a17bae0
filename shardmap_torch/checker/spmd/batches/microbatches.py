"""Loops over microbatches: `x.chunk(n)` of a dim that ranks share, on ranks and on one device.

The i-th chunks of all ranks hold other rows than the i-th chunk of one device. Both programs divide
the same blocks of rows into n parts, so that what adds up, or puts one behind the other, the same
function of each part gives the same. A value that depends on some of the parts is compared as if
the rows were in the ranks' order. It counts as that of one device again when the same expression of
all n parts has been added up, and is additive in blocks of rows, or has been concatenated in order,
and keeps the rows. Until then nothing else may be done with more than one part.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.checker.rules.infer import draws
from shardmap_torch.checker.spmd.batches.items import Items
from shardmap_torch.checker.spmd.batches.term_store import ADD_UP, TermStore, advice
from shardmap_torch.checker.spmd.batches.terms import (
    ADDS,
    ALL,
    Combined,
    Entry,
    Rearranged,
    State,
    Term,
    plain_key,
    shown,
    united,
)
from shardmap_torch.checker.spmd.layout import EACH, UnrelatedError, step_of
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded, is_view
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.core.autograd_state import grad_mode

aten = torch.ops.aten


class Microbatches:
    """Compares what operations make of microbatches, and notes the terms of results."""

    def __init__(self, store: TermStore, items: Items) -> None:
        self.store, self.items, self._notes = store, items, store.notes

    # -------------------------------------------------------------------------- operations

    def combine(self, call: PairedCall, is_position: bool) -> Combined | None:
        """Returns what an operation makes of its operands, before results and writes are noted.

        Of positions, their numbers say of which items they are.

        Raises:
            UnrelatedError: microbatches are combined otherwise than by adding them up.
        """
        if not self.store.is_active:
            return None
        made = self._number_of(call)
        terms = [term for term in map(self.store.term_of, call.read) if term is not None]
        if not terms or (is_position and all(term.is_item for term in terms)):
            return Combined(made)
        added = self._added(call)
        if added is not None:
            return Combined(made, added=added)
        is_linear = self._is_linear(call)
        self._require_one(call, terms, is_linear)
        return Combined(made, tuple(terms), is_linear=is_linear)

    def complete(
        self, layouts: list[Sharded], combined: Combined | Rearranged | None
    ) -> tuple[list[Sharded], Combined | Rearranged | None]:
        """Takes sums over all microbatches for what they are: no rank has another addend of them.

        Raises:
            UnrelatedError: an extremum is taken over microbatches.
        """
        if not isinstance(combined, Combined):
            return layouts, combined
        if any(axis == EACH for each in layouts for axis, _ in each.pending):
            raise UnrelatedError("it takes a maximum or minimum over microbatches", ADD_UP)
        sums = frozenset(n for n, each in enumerate(layouts) if EACH in each.partial)
        if not sums:
            return layouts, combined
        rest = [replace(x, partial=x.partial - {EACH}, means=x.means - {EACH}) for x in layouts]
        return rest, replace(combined, finished=sums)

    def note(self, call: PairedCall, combined: Combined | Rearranged | None) -> None:
        """Notes what the results of an operation are.

        Raises:
            UnrelatedError: it adds up along a dim what is no sum or mean over rows.
        """
        if combined is None:
            return
        if isinstance(combined, Rearranged):
            for result, entry in zip(call.results, combined.entries, strict=True):
                self.store.put(result, entry)
            return
        self.store.forget_written(call.written)
        for index, result in enumerate(call.results):
            entry = self._entry(combined, index, result)
            is_known = is_view(call.op) and self.store.knows(result)
            if not is_known or (entry.term is None) != (self.store.term_of(result) is None):
                self.store.put(result, entry)
        self.items.note_results(call.results)

    def _entry(self, combined: Combined, index: int, result: Tensor) -> Entry:
        if combined.added is not None:
            return self.store.sum_entry(combined.added)
        expression = self.store.number((combined.made, index))
        value = self.store.number((self.store.value_of(combined.made), index))
        self.store.note_value(expression, value)
        term = self._term(combined, expression, result)
        if index not in combined.finished:
            return Entry(expression, term)
        if term is None or term.indices != ALL or term.state != "additive":
            raise UnrelatedError(
                "it adds up over microbatches what is no sum, or mean, over the rows of each",
                ADD_UP,
            )
        return Entry(expression, None)

    def _term(self, combined: Combined, expression: int, result: Tensor) -> Term | None:
        """Returns what a result is of the microbatches of its operands."""
        if not combined.terms:
            return None
        first, states = combined.terms[0], {term.state for term in combined.terms}
        axes, shard = set(first.axes), self._notes.find_any(result)
        state: State = "item" if first.is_item else "mixed"
        if states == {"rows"} and shard is not None:
            if axes <= self._notes.sums(result).partial:
                state = "additive"
            elif axes <= set(shard.axes):
                state = "rows"
        elif states == {"additive"} and combined.is_linear:
            state = "additive"
        return replace(first, expression=expression, state=state)

    def _number_of(self, call: PairedCall) -> int:
        """Returns a number of an operation and its arguments, which equal calls share.

        Those through which gradients flow are others than those through which none do.
        """
        number = self.store.number
        if draws(call.op, call.arguments):
            return number(object())
        there = call.event.arguments
        arguments, values = (
            tuple([(k, f(x), plain_key(there.get(k))) for k, x in call.arguments.items()])
            for f in (self._frozen, self._frozen_value)
        )
        made = number((call.op, arguments, grad_mode(), self.store.interpreter.switches))
        return self.store.note_value(made, number((call.op, values)))

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return "tensor", self.store.expression_of(value), self.store.flows(value)
        if isinstance(value, list | tuple):
            return tuple(map(self._frozen, value))
        return plain_key(value)

    def _frozen_value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return "value", self.store.value_of(self.store.expression_of(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._frozen_value, value))
        return plain_key(value)

    def _added(self, call: PairedCall) -> Term | None:
        """Returns the sum of microbatches; None where an operation is not one."""
        if call.op not in ADDS or call.arguments.get("alpha", 1) != 1:
            return None
        x, y = call.arguments["self"], call.arguments["other"]
        if not torch.is_grad_enabled() and any(map(self.store.flows, call.tensors)):
            return None  # it cuts the gradients of some
        one, other = self.store.term_of(x), self.store.term_of(y) if isinstance(y, Tensor) else None
        if one is not None and other is not None:
            apart = one.indices.isdisjoint(other.indices)
            if not apart or x.shape != y.shape or not self.store.are_alike(x, y):
                return None
            return united(one, other)
        kept, zero = (x, y) if one is not None else (y, x)
        if not self._is_zero(zero) or kept.shape != call.results[0].shape:
            return None
        return one or other

    def _is_zero(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self._notes.sums(value).zero
        return type(value) in (int, float) and value == 0

    def _require_one(self, call: PairedCall, terms: Sequence[Term], is_linear: bool) -> None:
        """Requires that all terms are of the same microbatches, and other operands of none."""
        first = terms[0]
        if any(term.group != first.group or term.indices != first.indices for term in terms):
            what = "items of a sharded dim" if first.is_item else "microbatches"
            raise UnrelatedError(f"it combines {what}", advice(first))
        if len(first.indices) > 1 and not is_linear:
            raise UnrelatedError(f"it is not linear in {shown(first)}", advice(first))
        for x in call.read:
            shard = self._notes.find_any(x)
            if self.store.term_of(x) is not None or shard is None:
                continue
            own = {*shard.axes, *self._notes.sums(x).partial} & set(first.axes)
            if own or any(step_of(dim) is not None for dim in shard.dims):
                how = "taken apart" if first.is_item else "divided into microbatches"
                raise UnrelatedError(
                    f"it combines {shown(first)} with a value that is sharded over "
                    f"{min(own or first.axes)!r} and not {how}",
                    "divide it in the same way.",
                )

    def _is_linear(self, call: PairedCall) -> bool:
        is_term = self.store.term_of
        return is_view(call.op) or call.is_linear(lambda x: is_term(x) is not None, self._is_zero)

    # ------------------------------------------------------------------------- other steps

    def note_move(self, move: str, what: str, axes: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Notes the result of a collective.

        Raises:
            UnrelatedError: it takes a maximum or minimum of several microbatches.
        """
        if not self.store.is_active:
            return
        term = self.store.term_of(x)
        expression = self.store.number((move, what, self.store.expression_of(x)))
        if term is not None:
            if move in EXTREMA and len(term.indices) > 1:
                raise UnrelatedError(f"it is not linear in {shown(term)}", advice(term))
            mixes = term.state == "rows" and not set(axes).isdisjoint(term.axes)
            mixes |= move in EXTREMA and not term.is_item
            term = replace(term, expression=expression, state="mixed" if mixes else term.state)
        self.store.put(y, Entry(expression, term))
        self.items.note_results([y])

    def note_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Notes a rank's index, which is the same whenever a body asks for it."""
        if self.store.is_active:
            self.store.put(index, Entry(self.store.number(("index", *axes)), None))

    def note_copy(self, x: Tensor, y: Tensor) -> None:
        """Notes a copy."""
        if self.store.is_active:
            self.store.put(y, Entry(self.store.expression_of(x), self.store.term_of(x)))

    def reject(self, tensor: Tensor) -> None:
        """Requires that a value does not depend on some microbatches only.

        Raises:
            UnrelatedError: it does.
        """
        term = self.store.term_of(tensor)
        if term is not None:
            there = (
                "of which one device has more"
                if term.is_item
                else "which have other rows on one device"
            )
            raise UnrelatedError(f"it depends on {shown(term)}, {there}", advice(term))

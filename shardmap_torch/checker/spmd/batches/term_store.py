"""The terms of tensors: the expression of microbatches that each is, until it is written."""

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.spmd.batches.terms import Entry, Term
from shardmap_torch.checker.spmd.layout import UnrelatedError
from shardmap_torch.checker.spmd.recorder import TensorMap, memory_of
from shardmap_torch.checker.spmd.state import Notes

ADD_UP: Final = (
    "add up, or concatenate in order, the same expression of all of them, as in acc = acc + "
    "torch.func.grad(loss)(w, microbatch); average with a factor that is the same for each. "
    "If the dim is no batch, gather it before it is divided, with all_gather."
)
"""Advice where microbatches are used otherwise."""

JOIN: Final = (
    "do the same with each item, and add up the results, or stack or concatenate all in order; "
    "or gather the dim first, with all_gather."
)
"""Advice where items of a dim are used otherwise."""


def advice(term: Term) -> str:
    """Returns what to do with microbatches, or items."""
    return JOIN if term.is_item else ADD_UP


class TermStore:
    """The expression that each tensor is, and the term that it is of some microbatches.

    Attributes:
        interpreter: interprets the ranks' program.
        notes: its layouts.
        is_active: whether some dim has been divided; until then nothing is kept.
    """

    def __init__(self, interpreter: Interpreter, notes: Notes) -> None:
        self.interpreter, self.notes = interpreter, notes
        self.is_active = False
        self._entries: TensorMap[Entry] = TensorMap()
        self._versions: dict[int, int] = {}
        self._touched: set[int] = set()
        self._numbers: dict[Any, int] = {}
        self._values: dict[int, int] = {}

    def number(self, value: Any) -> int:
        """Returns a number of a value, which equal values share."""
        return self._numbers.setdefault(value, len(self._numbers))

    def term_of(self, tensor: Tensor) -> Term | None:
        """Returns what a tensor is of some microbatches; None if it depends on none.

        Raises:
            UnrelatedError: other entries of its memory depend on some.
        """
        if not self.is_active:
            return None
        entry, memory = self._entries.get(tensor), self._memory(tensor)
        is_stale = entry is None or entry.version != self._versions.get(memory, 0)
        if is_stale and memory in self._touched:
            raise UnrelatedError("some of its memory depends on some microbatches only", ADD_UP)
        return None if is_stale or entry is None else entry.term

    def expression_of(self, tensor: Tensor) -> int:
        """Returns the number of the expression that a tensor is."""
        entry, version = self._entries.get(tensor), self._versions.get(self._memory(tensor), 0)
        if entry is not None and entry.version == version:
            return entry.expression
        return self.number((TensorMap._key(tensor), version))

    def flows(self, tensor: Tensor) -> bool:
        """Returns whether gradients flow through a tensor."""
        return self.interpreter.flows_through(tensor)

    def value_of(self, expression: int) -> int:
        """Returns the number of an expression whatever gradients flow through its operands."""
        return self._values.get(expression, expression)

    def note_value(self, expression: int, value: int) -> int:
        """Notes what `value_of` returns; returns the expression."""
        self._values[expression] = value
        return expression

    def knows(self, tensor: Tensor) -> bool:
        """Returns whether these entries of memory have had an expression since the last write."""
        entry, version = self._entries.get(tensor), self._versions.get(self._memory(tensor), 0)
        is_read = (TensorMap._key(tensor), version) in self._numbers
        return is_read or (entry is not None and entry.version == version)

    def put(self, tensor: Tensor, entry: Entry) -> None:
        """Notes what a tensor is."""
        memory = self._memory(tensor)
        if entry.term is not None:
            self._touched.add(memory)
        self._entries.put(tensor, replace(entry, version=self._versions.get(memory, 0)))

    def sum_entry(self, term: Term) -> Entry:
        """Returns the entry of a sum of microbatches: that of all is another expression."""
        if term.is_item or len(term.indices) < term.count:
            return Entry(term.expression, term)
        return Entry(self.number(("all", term.expression)), None)

    def forget_written(self, tensors: Iterable[Tensor]) -> None:
        """Forgets what is noted for all tensors in the memory of these."""
        for tensor in tensors:
            memory = self._memory(tensor)
            self._versions[memory] = self._versions.get(memory, 0) + 1

    def are_alike(self, x: Tensor, y: Tensor) -> bool:
        """Returns whether two tensors are sharded, summed and differentiated in the same way."""
        one, other = self.notes.find_any(x), self.notes.find_any(y)
        if one is None or other is None or one.dims != other.dims:
            return False
        if self.flows(x) != self.flows(y):
            return False
        sums = [replace(self.notes.sums(each), cause="") for each in (x, y)]
        return sums[0] == sums[1]

    def _memory(self, tensor: Tensor) -> int:
        return memory_of(self.interpreter.fakify(tensor))

"""Comparisons of operations that are remembered: equal layers are compared once.

What a comparison finds depends on the call in both programs, on the layouts of the operands, and on
the types of the results. It is remembered where the operands are finished, so that no line that a
message names is part of it, and where nothing but layouts and sums is noted.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from torch import Tensor

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.spmd.layout import ShardedTensor
from shardmap_torch.checker.spmd.recorder import Key, Ref
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import Sums

Outcome: TypeAlias = tuple[tuple[ShardedTensor, Sums], ...]
"""Of each result."""


class Repeated:
    """The comparisons of one program that may come again."""

    def __init__(self, interpreter: Interpreter, notes: Notes) -> None:
        """Knows of none; layouts are read and noted in `notes`."""
        self._interpreter, self._notes = interpreter, notes
        self._known: dict[Key, Outcome] = {}
        self._numbers: dict[int, tuple[ShardedTensor, int]] = {}
        self._by_value: dict[ShardedTensor, int] = {}

    def key(self, own: Key | None, call: PairedCall, function: Any) -> Key | None:
        """Returns what a comparison depends on; None where it cannot be remembered."""
        event = call.event
        if own is None or event.key is None:
            return None
        if call.arguments.get("scale_grad_by_freq") is True:
            return None
        key = [own, event.key, function]
        for name, value in call.arguments.items():
            if not self._add(key, value, event.arguments.get(name)):
                return None
        notes, number_of = self._notes, self._interpreter.remembered.number_of
        for result in call.results:
            types = self._interpreter.storage_type(result).types
            key += (number_of(types)[1], notes.knows_sums(result))
        return tuple(key)

    def _add(self, key: list[Any], value: Any, there: Any) -> bool:
        """Adds the layouts of tensors, which have to be those of the event; the rest is known."""
        if isinstance(value, Tensor):
            sums = self._notes.sums(value)
            shard = self._notes.shard_of(value, there) if type(there) is Ref else None
            if shard is None or not sums.is_finished:
                return False
            key += (self._number(shard), sums.zero)
        elif isinstance(value, list | tuple) and any(isinstance(x, Tensor) for x in value):
            if not isinstance(there, tuple) or len(there) != len(value):
                return False
            return all([self._add(key, *each) for each in zip(value, there, strict=True)])
        return True

    def _number(self, shard: ShardedTensor) -> int:
        known = self._numbers.get(id(shard))
        if known is None:
            number = self._by_value.setdefault(shard, len(self._by_value))
            # Kept with what it is known by, so that no other layout gets its address.
            known = self._numbers[id(shard)] = shard, number
        return known[1]

    def note(self, key: Key | None, call: PairedCall) -> bool:
        """Notes the results of a comparison as before; returns whether it is known."""
        known = self._known.get(key) if key is not None else None
        if known is None:
            return False
        places = zip(call.results, call.event.results, known, strict=True)
        for result, (number, _), (shard, sums) in places:
            self._notes.note(result, number, shard)
            if not self._notes.knows_sums(result):
                self._notes.keep_sums(result, sums)
        return True

    def learn(self, key: Key | None, call: PairedCall, found: Sequence[Sharded] | None) -> None:
        """Remembers the comparison that has just been made, unless it has noted more than that."""
        if key is None or found is None:
            return
        if any(x.pending or x.means for x in found):
            return
        self._known[key] = tuple(
            (self._notes.find(result, Ref(number), "a result"), self._notes.sums(result))
            for result, (number, _) in zip(call.results, call.event.results, strict=True)
        )

"""Ids of a rank's part of a vocabulary, as in `w[torch.where(mask, ids - start, 0)] * mask`.

On one device all ids are in the part. On ranks the masks of the parts add up to that mask, since
the parts are the shards of one range. An entry that is looked up in a rank's part of a table is the
one on one device where the mask is true, and the mask makes it an addend of it. Nothing else is
done with masks, with ids counted from a rank's first one, and with what is looked up by them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.infer import writes_of
from shardmap_torch.checker.spmd.layout import UnrelatedError
from shardmap_torch.checker.spmd.recorder import Event, Ref
from shardmap_torch.checker.spmd.sharded import Sharded
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.values.part_rules import COPIES, RULES, STARTS, Outcome
from shardmap_torch.checker.spmd.values.parts import Call, KnownParts
from shardmap_torch.checker.spmd.values.positions import Positions, name_of
from shardmap_torch.core.torch_private.engine import OpOverload


class Intervals:
    """Lays out the values that are about a rank's part of all ids."""

    def __init__(self, notes: Notes, positions: Positions) -> None:
        """Knows of none; bounds are among `positions`."""
        self._notes, self._known = notes, KnownParts(notes, positions)

    def note_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Notes a tensor made of Python numbers."""
        if not bool(numbers.any()):
            self._known.put_zeros(made)

    def lay_out(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, results: Sequence[Tensor]
    ) -> list[Sharded] | None:
        """Lays out what is about a part of all ids, or summed over parts; None for any other."""
        outcome = self._outcome(op, arguments, event, results)
        for name in writes_of(op, arguments):
            for x in tensors_in(arguments[name]):
                self._known.drop(x)
        if outcome is None:
            return None
        part, sharded = outcome
        if part is not None:
            self._known.put(results[0], part)
        return sharded

    def _outcome(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, results: Sequence[Tensor]
    ) -> Outcome:
        """Applies the rule of an operation, if its operands are known."""
        name = name_of(op)
        parts = {
            key: part
            for key, x in (arguments.items() if self._known else ())
            if isinstance(x, Tensor) and (part := self._known.part_of(x))
        }
        call = Call(op, arguments, event, results, parts, {})
        rule = RULES.get(name)
        indices = tensors_in(arguments.get("indices")) if self._known else ()
        indexed = any(self._known.part_of(x) for x in indices)
        if not (parts or indexed or name in STARTS) or rule is None or len(results) != 1:
            if name in COPIES and isinstance(arguments.get("self"), Tensor) and len(results) == 1:
                self._known.follow_copy(call)
            return None
        if name not in STARTS and not self._known.are_finished(call):
            return None
        try:
            refs = event.arguments
            shards = {key: self._shards(x, refs.get(key)) for key, x in arguments.items()}
        except UnrelatedError:
            return None
        return rule(self._known, replace(call, shards=shards))

    def _shards(self, value: Any, ref: Any) -> Any:
        if isinstance(value, Tensor) and isinstance(ref, Ref):
            return self._notes.find(value, ref, "")
        if isinstance(value, list | tuple) and tensors_in(value):
            return [self._shards(*each) for each in zip(value, ref, strict=True)]
        return value

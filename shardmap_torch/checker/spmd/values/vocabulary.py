"""Ids of a rank's part of a vocabulary, as in `w[torch.where(mask, ids - start, 0)] * mask`.

On one device all ids are in the part. On ranks the masks of the parts add up to that mask, since
the parts are the shards of one range. An entry that is looked up in a rank's part of a table is the
one on one device where the mask is true, and the mask makes it an addend of it. Nothing else is
done with masks, with ids counted from a rank's first one, and with what is looked up by them.
"""

from torch import Tensor

from shardmap_torch.checker.rules.infer import tensors_of
from shardmap_torch.checker.spmd.layout import UnrelatedError
from shardmap_torch.checker.spmd.sharded import PairedCall, Sharded
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.values.id_range_rules import RULES, STARTS, Outcome
from shardmap_torch.checker.spmd.values.id_ranges import IdRangeCall, KnownIdRanges
from shardmap_torch.checker.spmd.values.positions import Positions, name_of
from shardmap_torch.checker.spmd.values.rows import COPIES


class VocabularyValues:
    """Lays out the values that are about a rank's part of all ids."""

    def __init__(self, notes: Notes, positions: Positions) -> None:
        """Knows of none; bounds are among `positions`."""
        self._notes, self._known = notes, KnownIdRanges(notes, positions)

    def note_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Notes a tensor made of Python numbers."""
        if not bool(numbers.any()):
            self._known.zeros.put(made, True)

    def lay_out(self, call: PairedCall) -> list[Sharded] | None:
        """Lays out what is about a part of all ids, or summed over parts; None for any other."""
        outcome = self._outcome(call)
        for x in call.written:
            self._known.drop(x)
        if outcome is None:
            return None
        part, sharded = outcome
        if part is not None:
            self._known.parts.put(call.results[0], part)
        return sharded

    def _outcome(self, call: PairedCall) -> Outcome:
        """Applies the rule of an operation, if its operands are known."""
        name, arguments, num_results = name_of(call.op), call.arguments, len(call.results)
        parts = {
            key: part
            for key, x in (arguments.items() if self._known.parts else ())
            if isinstance(x, Tensor) and (part := self._known.parts.get(x))
        }
        rule = RULES.get(name)
        indices = tensors_of(arguments.get("indices")) if self._known.parts else ()
        indexed = any(self._known.parts.get(x) for x in indices)
        if not (parts or indexed or name in STARTS) or rule is None or num_results != 1:
            if name in COPIES and isinstance(arguments.get("self"), Tensor) and num_results == 1:
                self._known.follow_copy(call)
            return None
        if name not in STARTS and not self._known.are_finished(call):
            return None
        there = call.event.arguments
        try:
            shards = {k: self._notes.layouts(x, there.get(k), k) for k, x in arguments.items()}
        except UnrelatedError:
            return None
        return rule(
            self._known, IdRangeCall(call.op, arguments, call.event, call.results, parts, shards)
        )

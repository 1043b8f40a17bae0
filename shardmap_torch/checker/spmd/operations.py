"""Compares an ATen operation on shards with the same operation on one device."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import (
    tensors_in,
)
from shardmap_torch.checker.rules.infer import (
    Refusal,
    Types,
    draws,
    signature_of,
    type_results,
    writes_of,
)
from shardmap_torch.checker.rules.lattice import sum_advice
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.checker.spmd.align import differing
from shardmap_torch.checker.spmd.batches.microbatches import Microbatches
from shardmap_torch.checker.spmd.layout import ANY, ShardedTensor, UnrelatedError, fitted
from shardmap_torch.checker.spmd.op_rules import TAKES_STACKS, propagate
from shardmap_torch.checker.spmd.ops.addends import as_addends, require_linear
from shardmap_torch.checker.spmd.ops.losses import IGNORING
from shardmap_torch.checker.spmd.recorder import Event, Ref
from shardmap_torch.checker.spmd.sharded import Sharded, Step, is_view
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import (
    NO_AXES,
    ONE,
    Sums,
    common_scale,
    factor_of,
    reject_scaled,
)
from shardmap_torch.checker.spmd.values.intervals import Intervals
from shardmap_torch.checker.spmd.values.maxima import Maxima
from shardmap_torch.checker.spmd.values.positions import Positions
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
)
from shardmap_torch.types import K, Partial, V, Z


class Operations:
    """Relates the results of ATen operations to those on one device, by rules and types."""

    def __init__(
        self,
        interpreter: Interpreter,
        notes: Notes,
        microbatches: Microbatches,
        positions: Positions,
        intervals: Intervals,
        maxima: Maxima,
    ) -> None:
        """Reads and notes layouts in `notes`."""
        self._interpreter, self._notes = interpreter, notes
        self._microbatches, self._positions = microbatches, positions
        self._intervals, self._maxima = intervals, maxima

    def compare(
        self,
        op: OpOverload,
        event: Event,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        in_backward: bool,
    ) -> None:
        """Requires that the results are shards of those of the event, and notes their layouts.

        Args:
            op: the overload.
            event: the same operation on one device.
            arguments: its arguments by name.
            results: the tensors that it makes.
            in_backward: whether the user's own backward calls it.

        Raises:
            UnrelatedError: they are not.
        """
        if len(results) != len(event.results):
            raise UnrelatedError(
                f"it gives {len(results)} tensors on a rank and {len(event.results)} on one device",
                "do with all of a sharded dim at once what is done with each entry, as "
                "torch.func.vmap does, or gather it first, with all_gather.",
            )
        read = _read_names(op)
        positions = self._positions.lay_out(op, arguments, event, results)
        part = self._intervals.lay_out(op, arguments, event, results)
        positions = part if positions is None else positions
        for name, tensor in named_tensors(arguments) if positions is None else ():
            if name in read and self._notes.sums(tensor).loose:
                self._notes.reject_loose(tensor, self._kept(op, tensor))
        shards = {
            name: self._shards(value, event.arguments.get(name), name, op in TAKES_STACKS)
            for name, value in arguments.items()
        }
        tensors = [tensor for _, tensor in named_tensors(arguments)]
        plain = {name: value for name, value in arguments.items() if not tensors_in(value)}
        others = [each.get("other") for each in (arguments, event.arguments)]
        factor = None if positions else factor_of(op, *others)
        global_shape = differing({} if factor is not None else plain, event)
        shapes = [
            (tuple(tensor.shape), shape)
            for tensor, (_, shape) in zip(results, event.results, strict=True)
        ]
        if any(len(local) != len(there) for local, there in shapes):
            raise UnrelatedError("on one device the result has another number of dims")
        # A run does not look at what backwards call.
        function = None if in_backward else self._interpreter.function
        zeros = frozenset(n for n, x in named_tensors(arguments) if self._notes.sums(x).zero)
        step = Step(op, shards, global_shape, tensors, shapes, self._notes.sizes, function, zeros)
        self._reject_hidden_writes(op, arguments, results, step)
        summed = self._summed(op, arguments, results)
        if factor not in (None, 1):
            there = event.arguments["other"]
            cause = (
                f"{messages.friendly(op)}, whose argument other is {arguments['other']} on a rank "
                f"and {there} on one device,"
            )
            summed = summed.scaled(factor or Fraction(1), NO_AXES, self._at(cause))
        rearranged = None if positions else self._microbatches.rearrange(step, arguments, event)
        special = positions or (rearranged.sharded if rearranged is not None else None)
        special = special or self._overwrite(op, arguments, event, shards)
        combined = rearranged or self._microbatches.combine(op, arguments, event, read, results)
        found, combined = self._microbatches.complete(special or propagate(step), combined)
        if op in IGNORING and any(sharded.means for sharded in found):
            self._interpreter.traits.averages = True
        for index, sharded in enumerate(found):
            number, shape = event.results[index]
            shard = fitted(sharded.dims, tuple(results[index].shape), shape)
            self._finish(op, arguments, results[index], number, shard, sharded, summed)
            if any(axis_type in EXTREMA for _, axis_type in sharded.pending):
                operands = [(x, event.arguments[name]) for name, x in arguments.items()]
                if any(self._flows(x) for _, x in named_tensors(arguments)):
                    self._maxima.begin(results[index], number, shape, operands)
        self._maxima.follow(op, event, arguments)
        self._microbatches.note(op, arguments, combined, results)

    def _overwrite(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, shards: Mapping[str, Any]
    ) -> list[Sharded] | None:
        """Lays out memory like what is copied into all of it; None where `copy_` does not do so."""
        target, source = shards.get("self"), shards.get("src")
        if op is not torch.ops.aten.copy_.default:
            return None
        if not isinstance(target, ShardedTensor) or not isinstance(source, ShardedTensor):
            return None
        same = (target.local, target.global_shape) == (source.local, source.global_shape)
        if not same or ANY in source.dims or not self._fills(arguments["self"]):
            return None
        if source.dims == target.dims:  # other views of the memory stay what they are
            return None
        self._notes.overwrite(arguments["self"], event.arguments["self"].number, source)
        return [Sharded(source.dims)]

    def _fills(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has all of its memory."""
        nbytes: int = self._interpreter.storage_type(tensor).storage.nbytes()
        return nbytes == tensor.numel() * tensor.itemsize

    def _at(self, what: str) -> str:
        """Names the user's line."""
        site, _ = self._interpreter.site()
        return what if site is None else f"{what} at {site}"

    def _kept(self, op: OpOverload, tensor: Tensor) -> frozenset[str]:
        """Returns the axes over which the result is pending in the same way as the operand."""
        pending = self._notes.sums(tensor).pending if is_view(op) else ()
        return frozenset(axis for axis, _ in pending)

    def _reject_hidden_writes(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
        step: Step,
    ) -> None:
        """Refuses statistics that an operation keeps of a sharded tensor."""
        made = {id(tensor) for tensor in results}
        hidden = [
            n
            for n in writes_of(op, arguments)
            for t in tensors_in(arguments[n])
            if id(t) not in made
        ]
        if hidden and any(shard.axes for shard in step.shards):
            raise UnrelatedError(
                f"it writes to {hidden[0]} what each rank sees of a sharded operand"
            )

    def _shards(self, value: Any, there: Any, name: str, takes_stacks: bool) -> Any:
        if isinstance(value, Tensor):
            if not isinstance(there, Ref):
                raise UnrelatedError(f"{name} is no tensor on one device")
            return self._notes.find(value, there, name, takes_stacks)
        if isinstance(value, list | tuple) and tensors_in(value):
            if not isinstance(there, tuple) or len(there) != len(value):
                raise UnrelatedError(f"{name} has another length on one device")
            pairs = zip(value, there, strict=True)
            return [self._shards(item, ref, name, takes_stacks) for item, ref in pairs]
        return value

    def _summed(
        self, op: OpOverload, arguments: Mapping[str, Any], results: Sequence[Tensor]
    ) -> Sums:
        """Returns the pending sums and the factor of the result."""
        try:
            return self._inherited(op, arguments, results)
        except UnrelatedError:
            notes = self._notes
            found = as_addends(op, arguments, results, notes.sums, notes.is_sharded, notes.sizes)
            if found is None:
                raise
            return found

    def _inherited(
        self, op: OpOverload, arguments: Mapping[str, Any], results: Sequence[Tensor]
    ) -> Sums:
        """Returns the pending sums and the factor that the result inherits from its operands."""
        read = _read_names(op)
        operands = [t for name, t in named_tensors(arguments) if name in read]
        scaled = common_scale([self._notes.sums(x) for x in operands])
        if scaled.scale != 1 and not is_view(op):
            require_linear(op, arguments, results, self._notes.sums)
        try:
            partial = self._partial(op, arguments, operands, results)
        except UnrelatedError:
            reject_scaled(scaled)  # of a mean there is more to say than that it is a sum
            raise
        return replace(scaled, partial=partial, loose=NO_AXES, pending=frozenset())

    def _partial(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        operands: Sequence[Tensor],
        results: Sequence[Tensor],
    ) -> frozenset[str]:
        """Returns the axes over which the result is a pending sum because operands are."""
        open_ = frozenset(axis for x in operands for axis in self._notes.sums(x).partial)
        if not open_:
            return open_
        adjacent = [x for x in operands if self._notes.is_sharded(x, open_)]
        if adjacent:
            axis = min(open_)
            raise UnrelatedError(
                f"it combines a pending sum over {axis!r} with a value that is sharded over "
                f"{axis!r}",
                f"all_reduce the sum over {axis!r} first.",
            )
        if is_view(op):
            return open_
        names = self._interpreter.axes
        outcomes = type_results(op, arguments, results, self._as_sums, len(names))
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                raise UnrelatedError(
                    f"over {names[outcome.axis or 0]!r} an operand is a pending sum: "
                    f"{outcome.reason}",
                    sum_advice(outcome.reason, names[outcome.axis or 0]),
                )
            for axis in open_:
                if outcome[names.index(axis)] != Partial:
                    raise UnrelatedError(f"it loses the pending sum over {axis!r}")
        return open_

    def _as_sums(self, x: Tensor) -> Types:
        """Returns the types of an operand: a pending sum, or finished (a write makes it V)."""
        sums = self._notes.sums(x)
        finished = Z if sums.zero else K
        return tuple(
            Partial if axis in sums.partial else finished if axis_type == V else axis_type
            for axis, axis_type in self._interpreter.by_axis(self._interpreter.types(x)).items()
        )

    def _finish(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        result: Tensor,
        number: int,
        shard: ShardedTensor,
        sharded: Sharded,
        summed: Sums,
    ) -> None:
        if sharded.partial and result.dtype == torch.bool:
            raise UnrelatedError(
                "whether any entry is true is no sum of whether any of a part is",
                "count them: x.sum(dim), all_reduce the counts, and compare them with 0.",
            )
        partial = summed.partial | sharded.partial
        if not partial.isdisjoint(shard.axes):
            axis = min(partial & set(shard.axes))
            raise UnrelatedError(
                f"its result is a pending sum over {axis!r} and sharded over it as well"
            )
        loose = frozenset(
            axis
            for axis, axis_type in self._notes.types(result)
            if axis_type == V and axis not in shard.axes and axis not in partial
        )
        mean, scale = ONE, summed.scale
        if sharded.means or sharded.divided != 1:
            sizes = self._notes.sizes
            mean = Fraction(prod(sizes[axis] for axis in sharded.means), sharded.divided)
            scale *= mean
        cause = "" if scale is ONE or scale == 1 else self._at(messages.friendly(op))
        sums = summed.scaled(mean, sharded.means, cause)
        sums = replace(sums, partial=partial, pending=sharded.pending)
        places = result, number, shard, sums, not draws(op, arguments)
        if writes_of(op, arguments) and not self._is_overwritten(*places):
            # Sums that are pending in the rest of the storage stay pending.
            loose |= self._notes.sums(result).loose
        self._notes.note(result, number, shard)
        if not self._notes.knows_sums(result) or writes_of(op, arguments):
            self._reject_gradients(arguments)
            self._notes.set_sums(result, replace(sums, loose=loose))

    def _reject_gradients(self, arguments: Mapping[str, Any]) -> None:
        """Refuses gradients that are divided by what a rank alone counts."""
        if arguments.get("scale_grad_by_freq") is True and self._flows(arguments["weight"]):
            ids = self._notes.find_any(arguments["indices"])
            if ids is not None and ids.axes:
                raise UnrelatedError(
                    "its backward divides by how often an id occurs, and counts a rank's ids only",
                    "gather the ids first, or leave scale_grad_by_freq out.",
                )

    def _flows(self, tensor: Tensor) -> bool:
        return self._interpreter.flows(self._interpreter.base(tensor))

    def _is_overwritten(
        self, tensor: Tensor, number: int, shard: ShardedTensor, sums: Sums, is_equal: bool
    ) -> bool:
        """Returns whether a write fills the storage; else it must match the rest of it."""
        before = self._notes.find(tensor, Ref(number), "what is written to")
        pairs = zip(before.dims, shard.dims, strict=True)
        if any(have not in (want, ANY) for have, want in pairs) or (
            ANY in shard.dims and not is_equal
        ):
            raise UnrelatedError(
                f"it writes a value sharded {shard.spec()} into one sharded {before.spec()}"
            )
        if before.dims != shard.dims:
            self._notes.lay_out_memory(tensor, before, shard)
        fills = self._fills(tensor)
        known = self._notes.sums(tensor)
        if sums.partial != known.partial and not (fills or known.zero):
            raise UnrelatedError("it writes a pending sum into finished values")
        if sums.scale != known.scale and not (fills or known.zero):
            reject_scaled(sums)
            reject_scaled(known)
        return fills


def named_tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    """Returns the tensors among arguments, with the names of these."""
    return [(name, tensor) for name, value in arguments.items() for tensor in tensors_in(value)]


def _read_names(op: OpOverload) -> frozenset[str]:
    """Returns the names of the arguments whose values matter."""
    signature, row = signature_of(op), row_of(op)
    unread = set(row.unread) if row is not None and not row.results else set()
    return frozenset(signature.names) - unread - signature.outs

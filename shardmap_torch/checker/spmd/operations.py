"""Compares an ATen operation on shards with the same operation on one device.

The analyses of one operation, in this order, the first that knows it deciding (`compare`):

1. positions, since they depend on the rank, which nothing else may;
2. what an equal operation on equal layouts has given before;
3. rules: the factor of a number that differs, the pending sums of operands, and how results are
   sharded (`ops/`); then what is pending, or each rank's own, and what is written.
"""

from collections.abc import Hashable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.fake_results import address_of
from shardmap_torch.checker.ir.repairs import is_divided
from shardmap_torch.checker.rules.infer import Types, draws, is_factor, named_tensors, type_results
from shardmap_torch.checker.rules.lattice import NONLINEAR, UNBRANCHED, Refusal
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.layout import (
    ANY,
    Shape,
    ShardedTensor,
    UnrelatedError,
    fitted,
    numbers_of_shards,
    size_of_one_rank,
)
from shardmap_torch.checker.spmd.ops.advice import (
    AVERAGED,
    DIVIDED,
    DRAWN,
    MEANS,
    PER_RANK,
    PICKED,
    SHARD,
)
from shardmap_torch.checker.spmd.ops.aten_rules import DRAW, propagate
from shardmap_torch.checker.spmd.ops.losses import IGNORING
from shardmap_torch.checker.spmd.ops.reductions import carried
from shardmap_torch.checker.spmd.positions import Positions
from shardmap_torch.checker.spmd.recorder import Key, Ref
from shardmap_torch.checker.spmd.sharded import (
    MICROBATCHES,
    PairedCall,
    Sharded,
    Step,
    counted_from_front,
    is_view,
)
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import (
    DIVIDING,
    NO_AXES,
    ONE,
    Sums,
    common_scale,
    factor_of,
    reject_scaled,
)
from shardmap_torch.core.source_location import Site
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.types import K, Partial, V, Z

Extrema: TypeAlias = frozenset[tuple[str, str]]
"""Axes, each with a reduction that is pending over it."""


class Operations:
    """Relates the results of ATen operations to those on one device, by rules and types."""

    def __init__(self, interpreter: Interpreter, notes: Notes, positions: Positions) -> None:
        self._interpreter, self._notes = interpreter, notes
        self._positions = positions
        self._repeated = Repeated(interpreter, notes)

    def compare(self, call: PairedCall, in_backward: bool, key: Key | None) -> None:
        """Requires that the results are shards of those on one device, and notes their layouts.

        Args:
            call: the operation in both programs.
            in_backward: whether the user's own backward calls it.
            key: equal for calls on ranks that differ in values alone; None where more counts.

        Raises:
            UnrelatedError: they are not.
        """
        event = call.event
        if len(call.results) != len(event.results):
            raise UnrelatedError(
                f"it gives {len(call.results)} tensors on a rank and {len(event.results)} on one "
                "device",
                MICROBATCHES,
            )
        positions = self._positions.lay_out(call)
        # A run does not look at what backwards call.
        function = None if in_backward else self._interpreter.function
        key = None if positions else self._repeated.key(key, call, function)
        if not self._repeated.note(key, call):
            self._repeated.learn(key, call, self._compare_anew(call, function, positions))

    def _compare_anew(
        self, call: PairedCall, function: Any, positions: list[Sharded] | None
    ) -> Sequence[Sharded] | None:
        """Compares by all rules; returns how results are sharded if nothing else was noted."""
        op, event = call.op, call.event
        for tensor in call.read if positions is None else ():
            if self._notes.sums(tensor).loose:
                self._reject_picked(call, tensor)
                advice = DRAWN if op._schema.name == DRAW else self._advice(tensor)
                self._notes.reject_loose(tensor, self._kept(op, tensor), advice)
        dtype = call.results[0].dtype
        by = None if positions else factor_of(op, call.arguments, event.arguments, dtype)
        name, factor = by or ("", ONE)
        step = self._step(call, function, name)
        self._reject_hidden_writes(call, step)
        summed = self._summed(call)
        if factor != 1:
            summed = summed.scaled(factor, NO_AXES, self._cause(call, name))
        special = positions or self._overwrite(call, step.arguments)
        layouts = special or propagate(step)
        if is_view(op) and any(shard.of_zeros for shard in step.shards):
            layouts = [replace(each, of_zeros=True) for each in layouts]
        if op in IGNORING and any(sharded.means for sharded in layouts):
            self._interpreter.traits.averages = True
        extrema, known = self._carried(call), dict[Any, tuple[ShardedTensor, Sums]]()
        for index, sharded in enumerate(layouts):
            result, (number, shape) = call.results[index], event.results[index]
            # Of equal positions of lists, as of layers, the first is laid out.
            types = self._interpreter.storage_type(result).types
            key = _hashable((sharded, tuple(result.shape), shape, result.dtype, types))
            if key not in known:
                known[key] = self._laid_out(call, result, shape, sharded, summed, extrema)
            self._finish(call, result, number, *known[key])
        return layouts if factor == 1 and special is None else None

    def _advice(self, own: Tensor) -> str:
        """Returns advice for a value of each rank's own, by what the user's line does with it."""
        made, site = self._interpreter.storage_type(own).made, self._interpreter.site()[0]
        is_index = made is not None and made.name.startswith("axis_index(")
        is_branch = site is not None and site.source.lstrip().startswith(("if ", "elif ", "while "))
        return UNBRANCHED if is_index and is_branch else PER_RANK

    def _reject_picked(self, call: PairedCall, own: Tensor) -> None:
        """Refuses the comparison of a rank's own extremum with that of all ranks."""
        extremum, origin = self._interpreter.storage_type(own), self._interpreter.storage_type
        for axis, kind in sorted(self._notes.sums(own).pending):
            for made in filter(None, [origin(x).made for x in call.read]):
                if made.collective is not None and made.operands[0].storage_type is extremum:
                    reason, fix = PICKED
                    raise UnrelatedError(
                        reason.format(kind, axis, extremum.origin()), fix.format(kind, axis)
                    )

    def _cause(self, call: PairedCall, name: str) -> str:
        """Says what makes a result a multiple of that on one device, by an argument."""
        here, there = call.arguments[name], call.event.arguments[name]
        site = self._interpreter.site()[0]
        source = "" if site is None else site.source
        if is_divided() or ("pmean(" in source and "/" not in source):
            return self.at(next((mean for mean in MEANS if mean in source), AVERAGED))
        if call.op in DIVIDING and there == 1 and here in numbers_of_shards(self._notes.sizes):
            mean = self._mean_before(call.tensors[0])
            twice = f", the second mean after {AVERAGED} at {mean}" if mean else ""
            return self.at(f"{DIVIDED}, {here},") + twice
        numbers = f"whose argument {name} is {here} on a rank and {there} on one device,"
        return self.at(f"{messages.friendly(call.op)}, {numbers}")

    def _mean_before(self, x: Tensor) -> Site | None:
        """Returns the line of the mean over ranks from which a value comes by a few steps."""
        means = {spot for spot, op in self._interpreter.traits.reductions.items() if op == "mean"}
        made = self._interpreter.storage_type(x).made
        for _ in range(6):
            if made is None or made.spot in means:
                return None if made is None else made.site
            made = made.operands[0].storage_type.made if made.operands else None
        return None

    def _step(self, call: PairedCall, function: Any, scaling: str) -> Step:
        """Returns the operation on layouts; the argument `scaling` may differ in both programs."""
        op, arguments, there = call.op, call.arguments, call.event.arguments
        shards: Mapping[str, Any] = {
            name: self._notes.layouts(value, there.get(name), name)
            for name, value in arguments.items()
        }
        differing = {n: value for n, value in call.differing.items() if n != scaling}
        if any(len(local) != len(global_shape) for local, global_shape in call.shapes):
            raise UnrelatedError("on one device the result has another number of dims")
        shards = counted_from_front(op, shards, call.shapes)
        zeros = frozenset(n for n, x in named_tensors(arguments) if self._notes.sums(x).zero)
        is_drawn = draws(op, arguments)
        drawn = self._notes.sharding_of_draws(call.results[0]) if is_drawn else ()
        sizes = self._notes.sizes
        return Step(op, shards, differing, call.tensors, call.shapes, sizes, function, zeros, drawn)

    def _overwrite(self, call: PairedCall, shards: Mapping[str, Any]) -> list[Sharded] | None:
        """Lays out memory like what is copied into all of it; None where `copy_` does not do so."""
        if call.op is not torch.ops.aten.copy_.default:
            return None
        memory, target, source = call.arguments["self"], shards["self"], shards["src"]
        if not isinstance(target, ShardedTensor) or not isinstance(source, ShardedTensor):
            return None
        same = (target.local, target.global_shape) == (source.local, source.global_shape)
        if not same or ANY in source.dims or not self._fills(memory):
            return None
        if source.dims == target.dims:  # other views of the memory stay what they are
            return None
        self._notes.overwrite(memory, call.event.arguments["self"].number, source)
        return [Sharded(source.dims)]

    def _fills(self, tensor: Tensor) -> bool:
        """Returns whether a tensor has all of its memory."""
        nbytes: int = self._interpreter.storage_type(tensor).storage.nbytes()
        return nbytes == tensor.numel() * tensor.itemsize

    def at(self, what: str) -> str:
        """Names the user's line."""
        site, _ = self._interpreter.site()
        return what if site is None else f"{what} at {site}"

    def _kept(self, op: OpOverload, tensor: Tensor) -> frozenset[str]:
        """Returns the axes over which the result is pending in the same way as the operand."""
        pending = self._notes.sums(tensor).pending
        return frozenset(dict(pending) if is_view(op) else carried(op, tensor.dtype, pending))

    def _reject_hidden_writes(self, call: PairedCall, step: Step) -> None:
        """Refuses statistics that an operation keeps of a sharded tensor."""
        results = {id(tensor) for tensor in call.results}
        hidden = [x for x in call.written if id(x) not in results]
        if hidden and any(shard.axes for shard in step.shards):
            name = next(n for n, x in named_tensors(call.arguments) if x is hidden[0])
            raise UnrelatedError(f"it writes to {name} what each rank sees of a sharded operand")

    def _summed(self, call: PairedCall) -> Sums:
        """Returns the pending sums and the factor of the result."""
        try:
            return self._inherited(call)
        except UnrelatedError:
            found = _as_addends(call, self._notes)
            if found is None:
                raise
            return found

    def _inherited(self, call: PairedCall) -> Sums:
        """Returns the pending sums and the factor that the result inherits from its operands."""
        scaled = common_scale([self._notes.sums(x) for x in call.read])
        if scaled.scale != 1 and not is_view(call.op):
            sums = self._notes.sums
            if not call.is_linear(lambda x: sums(x).scale != 1, lambda x: sums(x).zero):
                reject_scaled(common_scale([sums(x) for x in call.tensors]))
        try:
            partial = self._partial(call)
        except UnrelatedError:
            reject_scaled(scaled)  # of a mean there is more to say than that it is a sum
            raise
        equal = self._equal(call)
        return replace(scaled, partial=partial, loose=NO_AXES, pending=frozenset(), equal=equal)

    def _equal(self, call: PairedCall) -> frozenset[str]:
        """Returns the axes over which the result is equal on all ranks because operands are."""
        known = frozenset(axis for x in call.read for axis in self._notes.sums(x).equal)
        if not known or draws(call.op, call.arguments):
            return NO_AXES
        return known - {
            axis
            for x in call.read
            for axis, own in self._notes.types(x)
            if own.varies and axis not in self._notes.sums(x).equal
        }

    def _partial(self, call: PairedCall) -> frozenset[str]:
        """Returns the axes over which the result is a pending sum because operands are."""
        open_ = frozenset(axis for x in call.read for axis in self._notes.sums(x).partial)
        if not open_:
            return open_
        if any(self._notes.is_sharded(x, open_) for x in call.read):
            axis = min(open_)
            raise UnrelatedError(
                f"it combines a pending sum over {axis!r} with a value that is sharded over "
                f"{axis!r}",
                f"all_reduce the sum over {axis!r} first.",
            )
        if is_view(call.op):
            return open_
        names = self._interpreter.axes
        outcomes = type_results(call.op, call.arguments, call.results, self._as_sums, len(names))
        for outcome in outcomes:
            if isinstance(outcome, Refusal):
                axis = names[outcome.axis or 0]
                raise UnrelatedError(
                    f"over {axis!r} an operand is a pending sum: {outcome.reason}",
                    outcome.reason.advise(axis) or NONLINEAR.advise(axis),
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

    def _laid_out(
        self,
        call: PairedCall,
        result: Tensor,
        global_shape: Shape,
        sharded: Sharded,
        summed: Sums,
        extrema: Extrema,
    ) -> tuple[ShardedTensor, Sums]:
        """Returns how a result is sharded and summed; `extrema` are pending of operands too."""
        shard = fitted(sharded.dims, tuple(result.shape), global_shape)
        if sharded.of_zeros:
            shard = replace(shard, of_zeros=True)
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
            if axis_type == V and axis not in shard.axes and axis not in partial | summed.equal
        )
        equal = [axis for axis, own in self._notes.types(result) if axis in shard.axes and own != V]
        if equal and draws(call.op, call.arguments):
            raise UnrelatedError(
                f"over {equal[0]!r} all ranks draw the same, and it is sharded along dim "
                f"{shard.sharded_by(equal[0])}",
                SHARD,
            )
        mean, scale = ONE, summed.scale
        if sharded.means or sharded.part != 1:
            mean = sharded.part * prod(self._notes.sizes[axis] for axis in sharded.means)
            scale *= mean
        cause = "" if scale is ONE or scale == 1 else self.at(messages.friendly(call.op))
        scaled = summed.scaled(mean, sharded.means, cause)
        twice = dict(extrema).keys() & set(shard.axes)
        if twice:
            raise UnrelatedError(
                f"over {min(twice)!r} one operand is pending, and its result is sharded",
                f"all_reduce the first over {min(twice)!r} before.",
            )
        factor = scaled.scale, scaled.means, scaled.cause
        flows = bool(sharded.pending) and any(map(self._flows, call.tensors))
        pending = sharded.pending | extrema
        return shard, Sums(partial, loose, pending, *factor, flows=flows, equal=summed.equal)

    def _flows(self, tensor: Tensor) -> bool:
        return self._interpreter.flows(self._interpreter.base(tensor))

    def _finish(
        self, call: PairedCall, result: Tensor, number: int, shard: ShardedTensor, sums: Sums
    ) -> None:
        """Notes how a result is sharded and summed."""
        if call.written and not self._is_overwritten(call, result, number, shard, sums):
            # Sums that are pending in the rest of the storage stay pending.
            sums = replace(sums, loose=sums.loose | self._notes.sums(result).loose)
        if call.written and not sums.is_finished:
            self._reject_unseen(result)
        self._notes.note(result, number, shard)
        if not self._notes.knows_sums(result) or call.written:
            self._reject_gradients(call.arguments)
            self._notes.set_sums(result, sums)

    def _reject_unseen(self, tensor: Tensor) -> None:
        """Refuses what is not the value on one device where autograd may have saved another."""
        if address_of(tensor) in self._interpreter.unversioned:
            raise UnrelatedError(
                "it writes through .data, which autograd does not see, what is not the value on "
                "one device, and backwards may read it",
                "write into a clone, which no backward has saved.",
            )

    def _carried(self, call: PairedCall) -> Extrema:
        """Returns the extrema that are pending of results, as they are of operands."""
        known = [(x.dtype, self._notes.sums(x).pending) for x in call.tensors]
        found = [carried(call.op, dtype, pending) for dtype, pending in known if pending]
        return frozenset(each for one in found for each in one.items())

    def _reject_gradients(self, arguments: Mapping[str, Any]) -> None:
        """Refuses gradients that are divided by what a rank alone counts."""
        if arguments.get("scale_grad_by_freq") is True and self._flows(arguments["weight"]):
            ids = self._notes.find_any(arguments["indices"])
            if ids is not None and ids.axes:
                raise UnrelatedError(
                    "its backward divides by how often an id occurs, and counts a rank's ids only",
                    "gather the ids first, or leave scale_grad_by_freq out.",
                )

    def _is_overwritten(
        self, call: PairedCall, tensor: Tensor, number: int, shard: ShardedTensor, sums: Sums
    ) -> bool:
        """Returns whether a write fills the storage; else it must match the rest of it."""
        before = self._notes.find(tensor, Ref(number), "what is written to")
        if before.of_zeros:
            raise size_of_one_rank("what is written to")
        pairs = zip(before.dims, shard.dims, strict=True)
        if any(have not in (want, ANY) for have, want in pairs):
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


def _hashable(key: tuple[Any, ...]) -> Hashable:
    """Returns the key, or one that equals no other where sizes are symbols, which have no hash."""
    try:
        hash(key)
    except TypeError:
        return object()
    return key


Outcome: TypeAlias = tuple[tuple[ShardedTensor, Sums], ...]
"""Of each result."""


class Repeated:
    """The comparisons of one program that may come again."""

    def __init__(self, interpreter: Interpreter, notes: Notes) -> None:
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
        notes, number_of = self._notes, self._interpreter.numbers_of
        for result in call.results:
            types = self._interpreter.storage_type(result).types
            key += (number_of(types)[1], notes.knows_sums(result))
        return tuple(key)

    def _add(self, key: list[Any], value: Any, there: Any) -> bool:
        """Adds the layouts of tensors, which have to be those of the event; the rest is known."""
        if isinstance(value, Tensor):
            sums = self._notes.sums(value)
            shard = self._notes.shard_of(value, there) if type(there) is Ref else None
            if shard is None or not sums.is_finished or _hashable((shard,)) != (shard,):
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
        if any(x.pending or x.means or x.part != 1 for x in found):
            return
        self._known[key] = tuple(
            (self._notes.find(result, Ref(number), "a result"), self._notes.sums(result))
            for result, (number, _) in zip(call.results, call.event.results, strict=True)
        )


_ADDING: Final = overloads(
    "add.Tensor add.Scalar add_.Tensor add_.Scalar sub.Tensor sub.Scalar sub_.Tensor sub_.Scalar"
    " rsub.Tensor rsub.Scalar"
)


def _as_addends(call: PairedCall, notes: Notes) -> Sums | None:
    """Returns the state of a sum of which some operands are equal on all ranks, others addends.

    Each rank adds the equal ones, so that they add up to as many times their value as there are
    ranks. That is right where the addends add up to that multiple too, as means of parts do: the
    mean over the ranks of `x.mean() + c`. None where the multiples differ, or for no sum.
    """
    known = [notes.sums(x) for x in call.tensors]
    axes = frozenset(axis for each in known for axis in each.partial)
    copies = prod(notes.sizes[axis] for axis in axes)
    scales = {each.scale * (1 if each.partial else copies) for each in known if not each.zero}
    equal = [x for x, each in zip(call.tensors, known, strict=True) if each.partial != axes]
    has_number = call.op in _ADDING and is_factor(call.arguments.get("other"))
    if has_number:
        scales.add(Fraction(copies))
        call = replace(call, arguments={**call.arguments, "other": 0})
    if not axes or len(scales) != 1 or not (equal or has_number):
        return None
    if any(notes.sums(x).partial or notes.is_sharded(x, axes) for x in equal):
        return None
    if not call.is_linear(lambda x: True, lambda x: False):
        return None
    cause = next((each.cause for each in known if each.cause), "")
    means = NO_AXES.union(*(each.means for each in known))
    return Sums(partial=axes).scaled(scales.pop(), means, cause)

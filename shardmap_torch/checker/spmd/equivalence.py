"""Global strictness: compares the ranks' program step by step with the program on one device.

By induction every value of the ranks' program is its value on one device: sharded along dims
(S(i)), a pending sum over ranks (P), or replicated (I, R, K). A step after which that no longer
holds is an error at its line. Autograd's own steps are not compared: with a forward that means the
one-device program, and cotangents of the right types, its gradients are that program's. The user's
own backwards and hooks are compared: they get and return gradients sharded like their values.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from math import prod
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import (
    BACKWARD,
    COLLECTIVE,
    GRADIENT,
    INDEX,
    LITERAL,
    REGION,
    RESULT,
    UNOBSERVED,
    VALUE,
    Observer,
    made_by,
    tensors_in,
)
from shardmap_torch.checker.rules.infer import Refusal, Types, signature_of, type_results, writes_of
from shardmap_torch.checker.rules.lattice import sum_advice
from shardmap_torch.checker.rules.registry import row_of
from shardmap_torch.checker.spmd.align import Alignment, PartedError, differing, shown
from shardmap_torch.checker.spmd.collective_rules import Move, after
from shardmap_torch.checker.spmd.gradients import WRAP, Gradients
from shardmap_torch.checker.spmd.layout import ANY, Shape, ShardedTensor, UnrelatedError, fitted
from shardmap_torch.checker.spmd.op_rules import propagate
from shardmap_torch.checker.spmd.ops.addends import as_addends, require_linear
from shardmap_torch.checker.spmd.ops.losses import ignores
from shardmap_torch.checker.spmd.ops.microbatches import Microbatches
from shardmap_torch.checker.spmd.recorder import Event, Recorder, Ref
from shardmap_torch.checker.spmd.sharded import Sharded, Step
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import (
    NO_AXES,
    Sums,
    common_scale,
    factor_of,
    reject_scaled,
)
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import running_backward
from shardmap_torch.core.functorch import dims_of
from shardmap_torch.core.torch_private.engine import (
    OpOverload,
    disable_current_modes,
)
from shardmap_torch.spec import P
from shardmap_torch.types import K, Partial, V, Z

Named = Sequence[tuple[str, Tensor]]


class Relation(Observer):
    """Compares each step of the ranks' program with the recorded one-device program."""

    def __init__(
        self, interpreter: Interpreter, one: Recorder, without: frozenset[str] = NO_AXES
    ) -> None:
        """Starts at the first step of `one`, the record of the body with one rank on other axes.

        Args:
            interpreter: interprets the ranks' program.
            one: the record of the body on one device, or with the ranks of `without` alone.
            without: the axes over which nothing is related.
        """
        super().__init__()
        self._interpreter, self._one = interpreter, one
        self._alignment = Alignment(one)
        self._notes = Notes(interpreter, self._alignment, without)
        self._inside: list[Observer] = []
        self._microbatches = Microbatches(interpreter, self._notes)
        self._notes.reject_part = self._microbatches.reject
        self._gradients = Gradients(self._notes, self._microbatches)
        self._inputs = iter(one.inputs)

    def on_argument(self, tensor: Tensor, spec: P) -> None:
        """Lays out an argument as its spec says."""
        number, global_shape = next(self._inputs)
        self._notes.place(tensor, number, global_shape, spec)

    def on_closure(self, fake: Tensor, real: Tensor) -> None:
        """Lays out a closed-over tensor, which every rank has unsharded."""
        number = self._one.closures.get(id(real), -id(real))  # else the other never meets it
        self._notes.note(fake, number, ShardedTensor.unsharded(tuple(fake.shape)))

    def spec_of(self, tensor: Tensor) -> P | None:
        """Returns the spec of a tensor."""
        return self._notes.spec_of(tensor)

    def on_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Requires that a literal has the same numbers on one device."""
        with self._judged(LITERAL, []) as live:
            if live:
                event = self._take(LITERAL)
                with disable_current_modes():  # the numbers are real
                    same = event.literal is not None and torch.equal(event.literal, numbers)
                if not same:
                    raise UnrelatedError("it has other numbers there")
                ((number, _),) = event.results
                self._notes.note(made, number, ShardedTensor.unsharded(tuple(made.shape)))

    def on_axis_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Notes that a rank's index means nothing on one device."""
        with self._judged(INDEX, []) as live:
            if live:
                ((number, _),) = self._take(INDEX).results
                self._notes.note(index, number, ShardedTensor.unsharded(()))
                self._notes.set_sums(index, Sums(loose=frozenset(axes)))

    def on_collective(self, move: str, collective: Collective | None, x: Tensor, y: Tensor) -> None:
        """Requires that a collective only changes how one value is sharded or summed."""
        extremum = f"all_reduce with op={move!r}"
        with self._judged(extremum if move in EXTREMA else str(collective), [("x", x)]) as live:
            if live:
                event = self._take(COLLECTIVE)
                ((number, global_shape),) = event.results
                sums = self._notes.sums(x)
                self._notes.reject_loose(x, sums.over(move))
                if move in EXTREMA:
                    reject_scaled(sums)
                shard = self._notes.find(x, event.arguments["x"], "its operand")
                if collective is not None:
                    sizes = self._notes.sizes
                    axes = tuple(axis for axis in collective.axes if axis in sizes)
                    dims, partial = after(move, Move(collective, axes, shard, sums.partial, sizes))
                    shard = fitted(dims, tuple(y.shape), global_shape)
                    sums = replace(_without(sums, frozenset(axes)), partial=partial)
                self._notes.note(y, number, shard)
                self._notes.set_sums(y, sums)
                on = collective.axes if collective is not None else ()
                self._microbatches.note_move(move, str(collective), on, x, y)

    def on_python_value(self, name: str, tensors: Sequence[Tensor]) -> None:
        """Requires that a Python value comes from tensors that are unsharded on every rank."""
        with self._judged(f"{VALUE} {name}", [("tensor", x) for x in tensors]) as live:
            if live:
                refs = self._take(f"{VALUE} {name}").arguments["tensors"]
                for tensor, ref in zip(tensors, refs, strict=True):
                    self._notes.require(tensor, ref, P())

    def on_region_start(
        self, name: str, inputs: Sequence[Tensor], specs: Sequence[P], axes: frozenset[str]
    ) -> Observer:
        """Requires that the arguments of per-rank code are sharded as it declares."""
        inside = UNOBSERVED
        with self._judged(f"{REGION} {name}", [("argument", x) for x in inputs]) as live:
            if live:
                if any(dims_of(x)[1] for x in inputs):
                    raise UnrelatedError("its types say nothing about what a vmap batches")
                refs = self._take(f"{REGION} {name}").arguments["inputs"]
                inside = self._follow_region(inputs, refs, specs, axes)
        self._inside.append(inside)
        return inside

    def _follow_region(
        self,
        inputs: Sequence[Tensor],
        refs: Sequence[Ref],
        specs: Sequence[P],
        axes: frozenset[str],
    ) -> Observer:
        """Requires what a region declares, and returns what follows its steps."""
        for tensor, ref, spec in zip(inputs, refs, specs, strict=True):
            self._notes.require(tensor, ref, spec)
        return UNOBSERVED

    def on_region_end(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Lays out the results of per-rank code as it promises."""
        inside = self._inside.pop()
        with self._judged(f"{REGION} {name}", [("result", y) for y in outputs]) as live:
            if live:
                results = self._take(f"the end of {REGION} {name}").results
                places = zip(outputs, results, specs, strict=True)
                self._place_results(inside, list(places))

    def _place_results(
        self, inside: Observer, places: Sequence[tuple[Tensor, tuple[int, Shape], P]]
    ) -> None:
        """Notes the results of a region, which `inside` has followed."""
        for tensor, (number, global_shape), spec in places:
            self._notes.place(tensor, number, global_shape, spec)

    def on_result(self, path: str, value: Tensor, spec: P) -> None:
        """Requires that a result is sharded as its spec says."""
        with self._judged(f"{RESULT} {path}", [(path, value)], placed=False):
            event = self._take(f"{RESULT} {path}")
            self._notes.require(value, event.arguments["value"], spec)

    # --------------------------------------------------------------------------- gradients

    def on_gradient(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operands: Sequence[Tensor],
        gradients: Sequence[Tensor | None],
        before: Sequence[Tensor | None] = (),
    ) -> None:
        """Lays out gradients like their values: their types have been checked."""
        with self._judged(GRADIENT, []) as live:
            if live:
                event = self._take(GRADIENT)
                self._gradients.note(event, outputs, seeds, operands, gradients, before)
                self._gradients.has_custom_backward &= bool(self.followed)

    def on_backward_start(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Gives the cotangents of a custom backward the layouts of its values, as types ensure."""
        self.followed.append(running_backward())
        self._gradients.has_custom_backward = True
        with self._judged(f"{BACKWARD} {name}", _named("value", values)):
            event = self._take(f"{BACKWARD} {name}")
            refs, found = event.arguments["values"], iter(event.results)
            for value, gradient, ref in zip(values, gradients, refs, strict=True):
                if gradient is None:
                    continue
                shard = self._gradients.layout_of(value, ref)
                number, global_shape = next(found, (0, ()))
                if global_shape != shard.global_shape:
                    raise UnrelatedError("it gets gradients of other values", WRAP)
                self._gradients.note_cotangent(shard, value, gradient, number)

    def on_backward_end(
        self, name: str, values: Sequence[Tensor | None], gradients: Sequence[Tensor | None]
    ) -> None:
        """Requires the gradients it returns to have the layouts of their values."""
        with self._judged(f"{BACKWARD} {name}", _named("its gradient", gradients)):
            event = self._take(f"the end of {BACKWARD} {name}")
            refs = zip(event.arguments["values"], event.arguments["gradients"], strict=True)
            for value, gradient, (ref, found) in zip(values, gradients, refs, strict=True):
                if (gradient is None) != (found is None):
                    raise UnrelatedError("it returns a gradient in one program only", WRAP)
                if gradient is not None:
                    shard = self._gradients.layout_of(value, ref)
                    self._gradients.require(shard, value, gradient, found)
        self.followed.pop()

    def on_python_result(self, path: str, value: object) -> None:
        """Requires that a Python result equals the one on one device."""
        there = self._one.returns.get(path)
        if isinstance(value, bool | int | float | complex | str) and not _same(value, there):
            raise messages.error(
                self._interpreter,
                f"check='global': {RESULT} {path} is {value!r} on a rank and {there!r} on one "
                "device.",
                [],
                "return it as it is on one device: multiply sizes by axis_size(axis).",
                placed=False,
            )

    # -------------------------------------------------------------------------- operations

    def on_call(self, op: OpOverload, arguments: Mapping[str, Any], out: Any) -> None:
        """Requires that an operation on shards gives shards of the result on one device."""
        with self._judged(messages.friendly(op), _tensors(arguments)) as live:
            if live:
                results = made_by(op, arguments, out)
                event = self._alignment.take_unless_copy(op)
                self._notes.seal_copies()
                if event is None:
                    ((_, source),) = _tensors(arguments)
                    self._notes.copy(source, results[0])
                    self._microbatches.note_copy(source, results[0])
                elif results:  # else it answers a question about shapes
                    self._relate(op, event, arguments, results)

    def _relate(
        self,
        op: OpOverload,
        event: Event,
        arguments: Mapping[str, Any],
        results: Sequence[Tensor],
    ) -> None:
        if len(results) != len(event.results):
            raise UnrelatedError(
                f"it gives {len(results)} tensors on a rank and {len(event.results)} on one device",
                "do with all of a sharded dim at once what is done with each entry, as "
                "torch.func.vmap does, or gather it first, with all_gather.",
            )
        read = _read_names(op)
        for name, tensor in _tensors(arguments):
            if name in read and self._notes.sums(tensor).loose:
                self._notes.reject_loose(tensor, self._kept(op, tensor))
        shards = {
            name: self._shards(value, event.arguments.get(name), name)
            for name, value in arguments.items()
        }
        tensors = [tensor for _, tensor in _tensors(arguments)]
        plain = {name: value for name, value in arguments.items() if not tensors_in(value)}
        factor = factor_of(op, arguments.get("other"), event.arguments.get("other"))
        global_shape = differing({} if factor is not None else plain, event)
        shapes = [
            (tuple(tensor.shape), shape)
            for tensor, (_, shape) in zip(results, event.results, strict=True)
        ]
        if any(len(local) != len(there) for local, there in shapes):
            raise UnrelatedError("on one device the result has another number of dims")
        # A run does not look at what backwards call.
        function = None if self.followed else self._interpreter.function
        step = Step(op, shards, global_shape, tensors, shapes, self._notes.sizes, function)
        self._reject_hidden_writes(op, arguments, results, step)
        summed = self._summed(op, arguments, results)
        if factor not in (None, 1):
            there = event.arguments["other"]
            cause = (
                f"{messages.friendly(op)}, whose argument other is {arguments['other']} on a rank "
                f"and {there} on one device,"
            )
            summed = summed.scaled(factor or Fraction(1), NO_AXES, self._at(cause))
        special = self._microbatches.divide(op, arguments, event, shards)
        special = special or self._microbatches.concatenate(op, arguments)
        on_parts = (op, arguments, event, read, results, special is not None)
        combined = self._microbatches.combine(*on_parts)
        found = special or propagate(step)
        if ignores(step) and any(sharded.means for sharded in found):
            self._interpreter.averages = True
        for index, sharded in enumerate(found):
            number, shape = event.results[index]
            shard = fitted(sharded.dims, tuple(results[index].shape), shape)
            self._finish(op, arguments, results[index], number, shard, sharded, summed)
        self._microbatches.note(op, arguments, combined, results, special is not None)

    def _at(self, what: str) -> str:
        """Names the user's line."""
        site, _ = self._interpreter.site()
        return what if site is None else f"{what} at {site}"

    def _kept(self, op: OpOverload, tensor: Tensor) -> frozenset[str]:
        """Returns the axes over which the result is pending in the same way as the operand."""
        pending = self._notes.sums(tensor).pending if _is_view(op) else ()
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

    def _shards(self, value: Any, there: Any, name: str) -> Any:
        if isinstance(value, Tensor):
            if not isinstance(there, Ref):
                raise UnrelatedError(f"{name} is no tensor on one device")
            return self._notes.find(value, there, name)
        if isinstance(value, list | tuple) and tensors_in(value):
            if not isinstance(there, tuple) or len(there) != len(value):
                raise UnrelatedError(f"{name} has another length on one device")
            return [self._shards(item, ref, name) for item, ref in zip(value, there, strict=True)]
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
        operands = [t for name, t in _tensors(arguments) if name in read]
        scaled = common_scale([self._notes.sums(x) for x in operands])
        if scaled.scale != 1 and not _is_view(op):
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
        if _is_view(op):
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
        mean = Fraction(prod(self._notes.sizes[axis] for axis in sharded.means))
        cause = "" if summed.scale * mean == 1 else self._at(messages.friendly(op))
        sums = summed.scaled(mean, sharded.means, cause)
        sums = replace(sums, partial=partial, pending=sharded.pending)
        if writes_of(op, arguments) and not self._is_overwritten(result, number, shard, sums):
            # Sums that are pending in the rest of the storage stay pending.
            loose |= self._notes.sums(result).loose
        self._notes.note(result, number, shard)
        if not self._notes.knows_sums(result) or writes_of(op, arguments):
            self._reject_gradients(arguments, sharded)
            self._notes.set_sums(result, replace(sums, loose=loose))

    def _reject_gradients(self, arguments: Mapping[str, Any], sharded: Sharded) -> None:
        """Refuses gradients through an extremum, which equal entries would share by ranks."""
        extrema = [axis_type for _, axis_type in sharded.pending if axis_type in EXTREMA]
        if arguments.get("scale_grad_by_freq") is True and self._flows(arguments["weight"]):
            ids = self._notes.find_any(arguments["indices"])
            if ids is not None and ids.axes:
                raise UnrelatedError(
                    "its backward divides by how often an id occurs, and counts a rank's ids only",
                    "gather the ids first, or leave scale_grad_by_freq out.",
                )
        if extrema and any(self._flows(x) for _, x in _tensors(arguments)):
            raise UnrelatedError(
                f"it takes the {min(extrema)}imum over a sharded dim, and a gradient flows "
                "through it, which equal entries would share in other parts than on one device",
                "detach its operand if it needs no gradient, or wrap it and the all_reduce with "
                "op='max' or 'min' in one local_region.",
            )

    def _flows(self, tensor: Tensor) -> bool:
        return self._interpreter.flows(self._interpreter.base(tensor))

    def _is_overwritten(
        self, tensor: Tensor, number: int, shard: ShardedTensor, sums: Sums
    ) -> bool:
        """Returns whether a write fills the storage; else it must match the rest of it."""
        before = self._notes.find(tensor, Ref(number), "what is written to")
        if before.dims != shard.dims or ANY in shard.dims:
            raise UnrelatedError(
                f"it writes a value sharded {shard.spec()} into one sharded {before.spec()}"
            )
        fills = (
            self._interpreter.storage_type(tensor).storage.nbytes()
            == tensor.numel() * tensor.itemsize
        )
        known = self._notes.sums(tensor)
        if sums.partial != known.partial and not fills:
            raise UnrelatedError("it writes a pending sum into finished values")
        if sums.scale != known.scale and not fills:
            reject_scaled(sums)
            reject_scaled(known)
        return fills

    # ------------------------------------------------------------------------------ errors

    def _take(self, name: Any) -> Event:
        event = self._alignment.take(name)
        self._notes.seal_copies()
        return event

    @contextmanager
    def _judged(self, what: str, tensors: Named, placed: bool = True) -> Iterator[bool]:
        """Turns a failed comparison of a step into an error message.

        Yields whether the step is compared: steps of autograd are checked by their types alone.
        """
        try:
            yield not self.is_ignored
        except UnrelatedError as unrelated:
            head = f"check='global': {what} is not what it is on one device: {unrelated.reason}."
            lines = [self._line(name, tensor) for name, tensor in tensors]
            raise messages.error(self._interpreter, head, lines, unrelated.fix, placed) from None
        except PartedError as parted:
            raise messages.error(
                self._interpreter,
                f"check='global': the ranks come to {what}, where the program on one device "
                f"{shown(parted.there)}.",
                [],
                "write the body so that it takes the same steps whatever axis_size(axis) is, or "
                "wrap per-rank code in local_region.",
                placed,
            ) from None

    def _line(self, name: str, tensor: Tensor) -> str:
        tensor = self._interpreter.fakify(tensor)
        shape = f"{str(tensor.dtype).removeprefix('torch.')}{list(tensor.shape)}"
        origin = self._interpreter.storage_type(tensor).origin()
        return f"  {name}: {shape}, sharded {self.spec_of(tensor)!r}, from {origin}"


def _named(name: str, tensors: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for tensor in tensors if tensor is not None]


def _same(value: Any, other: Any) -> bool:
    return type(value) is type(other) and (value == other or (value != value and other != other))


def _without(sums: Sums, digits_taken: frozenset[str]) -> Sums:
    """Returns the sums without the axes over which extrema have been taken."""
    pending = frozenset(each for each in sums.pending if each[0] not in digits_taken)
    return replace(sums, loose=sums.loose - digits_taken, pending=pending)


def _tensors(arguments: Mapping[str, Any]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for name, value in arguments.items() for tensor in tensors_in(value)]


def _is_view(op: OpOverload) -> bool:
    """Returns whether the result shares its memory with an operand, and so its types."""
    shares = any(made.alias_info is not None for made in op._schema.returns)
    return shares and not op._schema.is_mutable and op is not torch.ops.aten.view.dtype


def _read_names(op: OpOverload) -> frozenset[str]:
    """Returns the names of the arguments whose values matter."""
    signature, row = signature_of(op), row_of(op)
    unread = set(row.unread) if row is not None and not row.results else set()
    return frozenset(signature.names) - unread - signature.outs

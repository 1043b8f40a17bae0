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
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.interpreter import messages
from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import (
    BACKWARD,
    COLLECTIVE,
    FUNCTION,
    GRADIENT,
    INDEX,
    LITERAL,
    REGION,
    RESULT,
    SWITCH,
    VALUE,
    Observer,
    made_by,
)
from shardmap_torch.checker.rules.infer import draws, may_draw, named_tensors
from shardmap_torch.checker.rules.rule import overloads
from shardmap_torch.checker.spmd.align import Alignment, PartedError, equal, shown
from shardmap_torch.checker.spmd.gradients import WRAP, Gradients
from shardmap_torch.checker.spmd.layout import ShardedTensor, UnrelatedError, fitted
from shardmap_torch.checker.spmd.operations import Operations
from shardmap_torch.checker.spmd.ops.advice import COPIES, IN_BACKWARD, NUMBER, OTHER
from shardmap_torch.checker.spmd.ops.collective_rules import Move, after
from shardmap_torch.checker.spmd.positions import Positions
from shardmap_torch.checker.spmd.recorder import Event, Key, Recorder, Ref
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.checker.spmd.sums import FINISHED, NO_AXES, Sums, part_of, reject_scaled
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.collectives.operations import Collective
from shardmap_torch.core.autograd_state import grad_mode, running_backward
from shardmap_torch.core.functorch import dims_of
from shardmap_torch.core.source_location import call_site, definition_of, user_call
from shardmap_torch.core.source_text import call_text
from shardmap_torch.core.torch_private.engine import OpOverload, disable_current_modes
from shardmap_torch.errors import ShardTypeError, show_shape
from shardmap_torch.spec import P
from shardmap_torch.types import K

Named = Sequence[tuple[str, Tensor]]

_ASSERTING: Final = overloads("_assert_async _assert_async.msg")
"""Operators by which a value that is false raises."""


class Relation(Observer):
    """Compares each step of the ranks' program with the recorded one-device program."""

    compares = True

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
        self._gradients = Gradients(self._notes)
        self._positions = Positions(self._notes, interpreter.mesh)
        self._operations = Operations(interpreter, self._notes, self._positions)
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
        return self._notes.spec_of(tensor)

    def scale_of(self, tensor: Tensor) -> Fraction:
        return self._notes.sums(tensor).scale

    def on_literal(self, made: Tensor, numbers: Tensor) -> None:
        """Requires that a literal has the same numbers on one device."""
        with self._judged(LITERAL, []) as live:
            if live:
                event = self._take(LITERAL)
                with disable_current_modes():  # the numbers are real
                    scale = part_of(numbers, event.literal, self._notes.sizes)
                if scale is None:
                    raise UnrelatedError("it has other numbers there")
                ((number, _),) = event.results
                self._notes.note(made, number, ShardedTensor.unsharded(tuple(made.shape)))
                cause = self._operations.at("the numbers of a literal")
                self._notes.set_sums(made, FINISHED.scaled(scale, NO_AXES, cause))

    def on_axis_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Notes that a rank's index means nothing on one device."""
        with self._judged(INDEX, []) as live:
            if live:
                ((number, _),) = self._take(INDEX).results
                self._notes.note(index, number, ShardedTensor.unsharded(()))
                self._notes.set_sums(index, Sums(loose=frozenset(axes)))
                self._positions.note_index(index, axes)

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
                    self._reject_flowing(x, sums)
                shard = self._notes.find(x, event.arguments["x"], "its operand")
                if collective is not None:
                    sizes = self._notes.sizes
                    axes = tuple(axis for axis in collective.axes if axis in sizes)
                    zero = sums.zero
                    sums = self._of_copies(sums, x, axes) if move == "sum" else sums
                    operand = Move(collective, axes, shard, sums.partial, sizes, zero)
                    dims, partial = after(move, operand)
                    shard = fitted(dims, tuple(y.shape), global_shape)
                    sums = replace(_without(sums, frozenset(axes)), partial=partial)
                self._notes.note(y, number, shard)
                self._notes.set_sums(y, sums)

    def _reject_flowing(self, x: Tensor, sums: Sums) -> None:
        """Refuses gradients of an extremum of each rank's part, which equal entries share.

        They do so evenly on one device, and on ranks first by ranks. That makes no difference where
        the gradient is 0, as in a softmax, which trials find.
        """
        if sums.flows:
            raise UnrelatedError(
                "a gradient flows through the maximum or minimum over a sharded dim, from "
                f"{self._interpreter.storage_type(x).origin()}, and equal entries may share it in "
                "other parts than on one device",
                "take it of all_gather(x, axis, dim=..., dst=R), as .amax(); or detach x, if it "
                "needs no gradient, as x.detach().amax().",
            )

    def _of_copies(self, sums: Sums, x: Tensor, axes: Sequence[str]) -> Sums:
        """Returns the sums of a value that is pending over axes because ranks have copies of it."""
        types = dict(self._notes.types(x))
        equal = frozenset(axis for axis in axes if types[axis] == K) - sums.partial
        copies = Fraction(prod(self._notes.sizes[axis] for axis in equal))
        found = sums.scaled(copies, NO_AXES, self._operations.at(COPIES))
        return replace(found, partial=sums.partial | equal)

    def on_python_value(
        self, name: str, tensors: Sequence[Tensor], raising: bool | None = None
    ) -> None:
        """Requires that a Python value comes from tensors that are unsharded on every rank.

        Where it makes the body raise, it is enough that it does so on one rank.
        """
        with self._judged(f"{VALUE} {name}", [("tensor", x) for x in tensors]) as live:
            if live:
                refs = self._take(f"{VALUE} {name}").arguments["tensors"]
                for tensor, ref in zip(tensors, refs, strict=True):
                    self._require_value(tensor, ref, raising)

    def _require_value(self, tensor: Tensor, ref: Ref, raising: bool | None) -> None:
        suffices = {True: "max", False: "min", None: ""}[raising]
        sums, shard = self._notes.sums(tensor), self._notes.find(tensor, ref, "it")
        is_open = bool(sums.partial or shard.axes or sums.scale != 1)
        if is_open or not sums.loose or sums.loose - sums.over(suffices):
            self._notes.require(tensor, ref, P())

    def on_region_start(self, name: str, inputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Requires that the arguments of per-rank code are sharded as it declares."""
        found = user_call()
        is_layer = found is not None and found[1].f_code.co_name != "region"
        what = call_text(found[0]).partition("(")[0] if found is not None and is_layer else ""
        with self._judged(what or f"{REGION} {name}", [("argument", x) for x in inputs]) as live:
            if live:
                if any(dims_of(x)[1] for x in inputs):
                    raise UnrelatedError("its types say nothing about what a vmap batches")
                refs = self._take(f"{REGION} {name}").arguments["inputs"]
                for tensor, ref, spec in zip(inputs, refs, specs, strict=True):
                    self._notes.require(tensor, ref, spec)

    def on_region_end(self, name: str, outputs: Sequence[Tensor], specs: Sequence[P]) -> None:
        """Lays out the results of per-rank code as it promises."""
        with self._judged(f"{REGION} {name}", [("result", y) for y in outputs]) as live:
            if live:
                results = self._take(f"the end of {REGION} {name}").results
                for tensor, (number, shape), spec in zip(outputs, results, specs, strict=True):
                    self._notes.place(tensor, number, shape, spec)

    def on_result(self, path: str, value: Tensor, spec: P) -> None:
        """Requires that a result is sharded as its spec says."""
        with self._judged(f"{RESULT} {path}", [(path, value)], placed=False):
            ref = self._take(f"{RESULT} {path}").arguments["value"]
            self._notes.require(value, ref, spec)

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

    def on_switch(self, switches: Sequence[bool]) -> None:
        """Requires that a checkpoint switches gradients on and off as on one device."""
        with self._judged(SWITCH, []) as live:
            if live and self._take(SWITCH).arguments["switches"] != switches:
                raise UnrelatedError("gradients are recorded in one program only", OTHER)

    def on_function(self, name: str) -> None:
        """Requires that one device applies a Function of that name, also inside of a checkpoint."""
        with self._judged(f"{FUNCTION} {name}", []) as live:
            if live:
                self._take(f"{FUNCTION} {name}")

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

    def on_parts(self, gradient: Tensor, axes: Sequence[str]) -> None:
        """Makes a pending sum of the n-th part of a value that all of n ranks have."""
        self._notes.set_sums(gradient, Sums(self._notes.sums(gradient).partial | {*axes}))

    def on_python_result(self, path: str, value: object) -> None:
        """Requires that a Python result equals the one on one device."""
        there = self._one.returns.get(path)
        if isinstance(value, bool | int | float | complex | str) and not equal(value, there):
            site = definition_of(self._interpreter.body)
            raise messages.error(
                self._interpreter,
                f"check='global': {RESULT} {path} is {value!r} on a rank and {there!r} on one "
                "device.",
                [] if site is None else [f"  returned by {site}"],
                "return it as it is on one device: multiply sizes by axis_size(axis).",
                placed=False,
            )

    # -------------------------------------------------------------------------- operations

    def on_call(
        self, op: OpOverload, arguments: Mapping[str, Any], out: Any, key: Key | None = None
    ) -> None:
        """Requires that an operation on shards gives shards of the result on one device."""
        if self.is_ignored:
            return
        try:
            made = made_by(op, arguments, out)
            self._compare(op, arguments, made, key)
            if may_draw(op) and draws(op, arguments):
                self._interpreter.traits.drawn += ((op, call_site(), self.spec_of(made[0])),)
        except (UnrelatedError, PartedError) as error:
            what = messages.friendly(op)
            raise self._refusal(error, what, named_tensors(arguments), True) from None

    def _compare(
        self, op: OpOverload, arguments: Mapping[str, Any], results: Sequence[Tensor], key: Any
    ) -> None:
        event = self._alignment.take_unless_copy(op)
        self._notes.make_copies_read_only()
        if event is None:
            ((_, source),) = named_tensors(arguments)
            self._notes.copy(source, results[0])
        elif event.grad_mode != grad_mode():
            raise UnrelatedError("gradients are recorded in one program only", OTHER)
        elif op in _ASSERTING:
            self._require_value(arguments["self"], event.arguments["self"], raising=False)
        elif results:  # else it answers a question about shapes
            call = PairedCall(op, arguments, event, results)
            self._operations.compare(call, bool(self.followed), key)

    def on_end(self) -> None:
        """Requires that the program on one device has ended too, with its backward."""
        with self._judged("their end", [], placed=False):
            self._alignment.end()

    # ------------------------------------------------------------------------------ errors

    def _take(self, name: Any) -> Event:
        event = self._alignment.take(name)
        self._notes.make_copies_read_only()
        return event

    @contextmanager
    def _judged(self, what: str, tensors: Named, placed: bool = True) -> Iterator[bool]:
        """Turns a failed comparison of a step into an error message.

        Yields whether the step is compared: steps of autograd are checked by their types alone.
        """
        try:
            yield not self.is_ignored
        except (UnrelatedError, PartedError) as error:
            raise self._refusal(error, what, tensors, placed) from None

    def _refusal(
        self, error: UnrelatedError | PartedError, what: str, tensors: Named, placed: bool
    ) -> ShardTypeError:
        """Returns the error of a step of this name that has failed to be compared."""
        if isinstance(error, UnrelatedError):
            reason = error.reason
            if error.first is not None:
                first = self._interpreter.storage_type(error.first).first
                reason = f"{reason}, from {first.origin()}"
            head = f"check='global': {what} is not what it is on one device: {reason}."
            lines = [self._line(name, tensor) for name, tensor in tensors]
            fix = error.fix
            if what.startswith(BACKWARD) and fix == NUMBER:
                [axis, *others] = map(repr, self._notes.sizes)
                fix = IN_BACKWARD.format("axis" if others else axis)
            return messages.error(self._interpreter, head, lines, fix, placed)
        return messages.error(
            self._interpreter,
            f"check='global': the ranks come to {what}, where the program on one device "
            f"{shown(error.there)}.",
            [],
            "write the body so that it takes the same steps whatever axis_size(axis) is, or "
            "wrap per-rank code in local_region.",
            placed,
        )

    def _line(self, name: str, tensor: Tensor) -> str:
        tensor = self._interpreter.fakify(tensor)
        shape = show_shape(tensor.dtype, tensor.shape)
        origin = self._interpreter.storage_type(tensor).origin()
        spec = self.spec_of(tensor)
        how = f"sharded {spec!r}" if spec is None or spec.named else "not sharded"
        return f"  {name}: {shape}, {how}, from {origin}"


def _named(name: str, tensors: Sequence[Tensor | None]) -> list[tuple[str, Tensor]]:
    return [(name, tensor) for tensor in tensors if tensor is not None]


def _without(sums: Sums, digits_taken: frozenset[str]) -> Sums:
    """Returns the sums without the axes over which extrema have been taken."""
    pending = frozenset(each for each in sums.pending if each[0] not in digits_taken)
    return replace(sums, loose=sums.loose - digits_taken, pending=pending)

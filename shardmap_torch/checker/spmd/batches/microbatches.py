"""Loops over microbatches: `x.chunk(n)` of a dim that ranks share, on ranks and on one device.

The i-th chunks of all ranks hold other rows than the i-th chunk of one device. Both programs divide
the same blocks of rows into n parts, so that what adds up, or puts one behind the other, the same
function of each part gives the same. A value that depends on some of the parts is compared as if
the rows were in the ranks' order. It counts as that of one device again when the same expression of
all n parts has been added up, and is additive in blocks of rows, or has been concatenated in order,
and keeps the rows. Until then nothing else may be done with more than one part.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.ir.sizes import exact
from shardmap_torch.checker.rules.infer import Refusal, Types, signature_of, type_results, writes_of
from shardmap_torch.checker.spmd.batches.chunks import CHUNKS, VIEWS, divided, undivided
from shardmap_torch.checker.spmd.batches.parts import (
    ALL,
    Combined,
    Entry,
    Part,
    Rearranged,
    State,
    plain_key,
    shown,
    united,
)
from shardmap_torch.checker.spmd.layout import (
    EACH,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    reshape,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import Event, TensorMap
from shardmap_torch.checker.spmd.sharded import Sharded, Step, is_view
from shardmap_torch.checker.spmd.state import Notes
from shardmap_torch.collectives.moves import EXTREMA
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import DisableTorchFunction, OpOverload
from shardmap_torch.types import K, Partial, Z

aten = torch.ops.aten

_ADDS: Final = (aten.add.Tensor, aten.add_.Tensor)
_FIX: Final = (
    "add up, or concatenate in order, the same expression of all of them, as in acc = acc + "
    "torch.func.grad(loss)(w, microbatch); average with a factor that is the same for each. "
    "If the dim is no batch, gather it before it is divided, with all_gather."
)


class Microbatches:
    """Keeps what each tensor is of the microbatches."""

    def __init__(self, interpreter: Interpreter, notes: Notes) -> None:
        """Starts with no dim divided."""
        self._interpreter, self._notes = interpreter, notes
        self._is_active = False
        self._entries: TensorMap[Entry] = TensorMap()
        self._versions: dict[int, int] = {}
        self._touched: set[int] = set()
        self._numbers: dict[Any, int] = {}

    # -------------------------------------------------------------------------- operations

    def rearrange(
        self, step: Step, arguments: Mapping[str, Any], event: Event
    ) -> Rearranged | None:
        """Lays out microbatches, or the rows of all; None where an operation makes neither.

        Raises:
            UnrelatedError: it divides a microbatch again.
        """
        if step.op in CHUNKS:
            return self._chunks_of(step, arguments, event)
        if step.op in VIEWS:
            return self._viewed(step, arguments)
        rule = _REARRANGING.get(step.op) if self._is_active else None
        return None if rule is None else rule(self, step, arguments, event)

    def _chunks_of(
        self, step: Step, arguments: Mapping[str, Any], event: Event
    ) -> Rearranged | None:
        x = step.arguments["self"]
        dim = arguments["dim"] % len(x.dims)
        axes = axes_of(x.dims[dim])
        leading = x.dims[dim][: len(axes)]
        if not axes or EACH in axes or axes_of(leading) != axes:
            return None
        here = CHUNKS[step.op](arguments, x.local[dim])
        there = CHUNKS[step.op](event.arguments, x.global_shape[dim])
        if here is None or there is None or here.key != there.key or here.size == there.size:
            return None
        made = self._begin(arguments["self"])
        found = (*x.dims[:dim], (*leading, *unsharded(here.size)), *x.dims[dim + 1 :])
        expression = self._number(("chunk", made, dim, here.count))
        parts = [Part(here.count, axes, frozenset({i}), expression, "rows") for i in here.indices]
        return Rearranged([Sharded(found)] * len(parts), [Entry(expression, p) for p in parts])

    def _viewed(self, step: Step, arguments: Mapping[str, Any]) -> Rearranged | None:
        """Lays out a view that divides a dim, or has the rows of all microbatches in one."""
        tensor, ((local, there),) = arguments["self"], step.results
        x, part = step.arguments["self"], self._part_of(tensor)
        if part is not None and EACH in x.axes and part.state == "rows":
            dims = reshape(x, there)
            joined = tuple(undivided(dim, part.axes) for dim in dims)
            made = self._number(("rows", self._expression_of(tensor)))
            return Rearranged([Sharded(joined)], [Entry(made, None)]) if joined != dims else None
        found = divided(x, local, there)
        if found is None:
            return None
        dim = next(n for n, each in enumerate(found) if EACH in axes_of(each))
        axes = axes_of(x.dims[dim])
        expression = self._number(("divided", self._begin(tensor), *map(exact, local)))
        part = Part(local[dim], axes, ALL, expression, "rows")
        return Rearranged([Sharded(found)], [Entry(expression, part)])

    def _begin(self, x: Tensor) -> int:
        """Returns the expression of what is divided."""
        if self._part_of(x) is not None:
            raise UnrelatedError(
                "it divides a microbatch again", "divide the batch once, into all microbatches."
            )
        self._is_active = True
        made = self._expression_of(x)
        self._put(x, Entry(made, None))
        return made

    def _all_in_order(self, tensors: Sequence[Tensor]) -> tuple[Part, ShardedTensor] | None:
        """Returns what these are, if they are the same expression of all microbatches in order."""
        parts = [self._part_of(x) for x in tensors]
        first, shard = parts[0], self._notes.find_any(tensors[0])
        if first is None or shard is None or first.indices == ALL:
            return None
        wanted = [replace(first, indices=frozenset({i})) for i in range(first.count)]
        if parts != wanted or not all(self._alike(tensors[0], x) for x in tensors):
            return None
        return first, shard

    def _concatenated(
        self, step: Step, arguments: Mapping[str, Any], event: Event
    ) -> Rearranged | None:
        found = self._all_in_order(arguments["tensors"])
        if found is None or found[0].state != "rows":
            return None
        first, x = found
        dim = arguments["dim"] % len(x.dims)
        digits = x.dims[dim]
        leading = digits[: len(first.axes)]
        if axes_of(leading) != first.axes or axes_of(digits) != first.axes:
            return None
        rest = unsharded(x.local[dim] * first.count)
        dims = (*x.dims[:dim], (*leading, *rest), *x.dims[dim + 1 :])
        entry = Entry(self._number(("rows", first.expression, dim)), None)
        return Rearranged([Sharded(dims)], [entry])

    def _stacked(self, step: Step, arguments: Mapping[str, Any], event: Event) -> Rearranged | None:
        found = self._all_in_order(arguments["tensors"])
        if found is None:
            return None
        first, x = found
        dim = arguments["dim"] % (len(x.dims) + 1)
        expression = self._number(("stack", first.expression, dim))
        part = replace(first, indices=ALL, expression=expression)
        dims = (*x.dims[:dim], ((EACH, first.count),), *x.dims[dim:])
        return Rearranged([Sharded(dims)], [Entry(expression, part)])

    def _taken(self, step: Step, arguments: Mapping[str, Any], event: Event) -> Rearranged | None:
        """Lays out microbatches that lie along a dim, each by itself."""
        x, part = step.arguments["self"], self._part_of(arguments["self"])
        dim = arguments["dim"] % max(len(x.dims), 1)
        index = arguments.get("index")
        if part is None or x.dims[dim] != ((EACH, part.count),):
            return None
        if index != event.arguments.get("index"):
            return None
        taken = [*range(part.count)] if index is None else [index % part.count]
        expression = self._number(("entry", part.expression, dim))
        each = Sharded((*x.dims[:dim], *x.dims[dim + 1 :]))
        parts = [replace(part, indices=frozenset({i}), expression=expression) for i in taken]
        return Rearranged([each] * len(parts), [Entry(expression, one) for one in parts])

    def combine(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        event: Event,
        read: frozenset[str],
        results: Sequence[Tensor],
    ) -> Combined | None:
        """Returns what an operation makes of its operands, before results and writes are noted.

        Raises:
            UnrelatedError: microbatches are combined otherwise than by adding them up.
        """
        if not self._is_active:
            return None
        made = self._made(op, arguments, event)
        operands = [x for n, value in arguments.items() if n in read for x in tensors_in(value)]
        parts = [part for part in map(self._part_of, operands) if part is not None]
        if not parts:
            return Combined(made)
        added = self._added(op, arguments, results)
        if added is not None:
            return Combined(made, added=added)
        self._require_one(op, arguments, operands, parts, results)
        return Combined(made, tuple(parts), is_linear=self._is_linear(op, arguments, results))

    def complete(
        self, found: list[Sharded], combined: Combined | Rearranged | None
    ) -> tuple[list[Sharded], Combined | Rearranged | None]:
        """Takes sums over all microbatches for what they are: no rank has another addend of them.

        Raises:
            UnrelatedError: an extremum is taken over microbatches.
        """
        if not isinstance(combined, Combined):
            return found, combined
        if any(axis == EACH for each in found for axis, _ in each.pending):
            raise UnrelatedError("it takes a maximum or minimum over microbatches", _FIX)
        sums = frozenset(n for n, each in enumerate(found) if EACH in each.partial)
        if not sums:
            return found, combined
        rest = [replace(x, partial=x.partial - {EACH}, means=x.means - {EACH}) for x in found]
        return rest, replace(combined, finished=sums)

    def note(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        combined: Combined | Rearranged | None,
        results: Sequence[Tensor],
    ) -> None:
        """Notes what the results of an operation are.

        Raises:
            UnrelatedError: it adds up along a dim what is no sum or mean over rows.
        """
        if combined is None:
            return
        if isinstance(combined, Rearranged):
            for result, entry in zip(results, combined.entries, strict=True):
                self._put(result, entry)
            return
        for name in writes_of(op, arguments):
            for x in tensors_in(arguments[name]):
                self._versions[self._storage(x)] = self._versions.get(self._storage(x), 0) + 1
        for index, result in enumerate(results):
            self._put(result, self._made_entry(combined, index, result))

    def _made_entry(self, combined: Combined, index: int, result: Tensor) -> Entry:
        if combined.added is not None:
            return self._entry(combined.added)
        expression = self._number((combined.made, index))
        part = self._made_part(combined, expression, result)
        if index not in combined.finished:
            return Entry(expression, part)
        if part is None or part.indices != ALL or part.state != "additive":
            raise UnrelatedError(
                "it adds up over microbatches what is no sum, or mean, over the rows of each", _FIX
            )
        return Entry(expression, None)

    def _made_part(self, combined: Combined, expression: int, result: Tensor) -> Part | None:
        """Returns what a result is of the microbatches of its operands."""
        if not combined.parts:
            return None
        first, states = combined.parts[0], {part.state for part in combined.parts}
        axes, shard = set(first.axes), self._notes.find_any(result)
        state: State = "mixed"
        if states == {"rows"} and shard is not None:
            if axes <= self._notes.sums(result).partial:
                state = "additive"
            elif axes <= set(shard.axes):
                state = "rows"
        elif states == {"additive"} and combined.is_linear:
            state = "additive"
        return replace(first, expression=expression, state=state)

    def _made(self, op: OpOverload, arguments: Mapping[str, Any], event: Event) -> int:
        """Returns a number of an operation and its arguments, which equal calls share."""
        if signature_of(op).random:
            return self._number(object())
        return self._number(
            (
                op,
                tuple(
                    (name, self._frozen(value), plain_key(event.arguments.get(name)))
                    for name, value in arguments.items()
                ),
                torch.is_grad_enabled(),
            )
        )

    def _frozen(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return ("tensor", self._expression_of(value))
        if isinstance(value, list | tuple):
            return tuple(map(self._frozen, value))
        return plain_key(value)

    def _added(
        self, op: OpOverload, arguments: Mapping[str, Any], results: Sequence[Tensor]
    ) -> Part | None:
        """Returns the sum of microbatches; None where an operation is not one."""
        if op not in _ADDS or arguments.get("alpha", 1) != 1:
            return None
        x, y = arguments["self"], arguments["other"]
        one, other = self._part_of(x), self._part_of(y) if isinstance(y, Tensor) else None
        if one is not None and other is not None:
            apart = one.indices.isdisjoint(other.indices)
            if not apart or x.shape != y.shape or not self._alike(x, y):
                return None
            return united(one, other)
        kept, zero = (x, y) if one is not None else (y, x)
        if not self._is_zero(zero) or kept.shape != results[0].shape:
            return None
        return one or other

    def _alike(self, x: Tensor, y: Tensor) -> bool:
        one, other = self._notes.find_any(x), self._notes.find_any(y)
        sums = [replace(self._notes.sums(each), cause="") for each in (x, y)]
        return (
            one is not None
            and other is not None
            and one.dims == other.dims
            and (sums[0] == sums[1])
        )

    def _is_zero(self, value: Any) -> bool:
        if isinstance(value, Tensor):
            return self._notes.sums(value).zero
        return type(value) in (int, float) and value == 0

    def _require_one(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        operands: Sequence[Tensor],
        parts: Sequence[Part],
        results: Sequence[Tensor],
    ) -> None:
        """Requires that all parts are of the same microbatches, and other operands of none."""
        first = parts[0]
        if any(part.group != first.group or part.indices != first.indices for part in parts):
            raise UnrelatedError("it combines microbatches", _FIX)
        if len(first.indices) > 1 and not self._is_linear(op, arguments, results):
            raise UnrelatedError(f"it is not linear in {shown(first)}", _FIX)
        for x in operands:
            shard = self._notes.find_any(x)
            if self._part_of(x) is not None or shard is None:
                continue
            own = {*shard.axes, *self._notes.sums(x).partial} & set(first.axes)
            if own or any(step_of(dim) is not None for dim in shard.dims):
                raise UnrelatedError(
                    f"it combines {shown(first)} with a value that is sharded over "
                    f"{min(own or first.axes)!r} and not divided into microbatches",
                    "divide it in the same way.",
                )

    def _is_linear(
        self, op: OpOverload, arguments: Mapping[str, Any], results: Sequence[Tensor]
    ) -> bool:
        def seen(x: Tensor) -> Types:
            if self._part_of(x) is not None:
                return (Partial,)
            return (Z,) if self._is_zero(x) else (K,)

        if is_view(op):
            return True
        outcomes = type_results(op, arguments, results, seen, 1)
        return all(not isinstance(each, Refusal) and each == (Partial,) for each in outcomes)

    # ------------------------------------------------------------------------- other steps

    def note_move(self, move: str, what: str, axes: Sequence[str], x: Tensor, y: Tensor) -> None:
        """Notes the result of a collective.

        Raises:
            UnrelatedError: it takes a maximum or minimum of several microbatches.
        """
        if not self._is_active:
            return
        part, expression = self._part_of(x), self._number((move, what, self._expression_of(x)))
        if part is not None:
            if move in EXTREMA and len(part.indices) > 1:
                raise UnrelatedError(f"it is not linear in {shown(part)}", _FIX)
            mixes = part.state == "rows" and not set(axes).isdisjoint(part.axes)
            state: State = "mixed" if mixes or move in EXTREMA else part.state
            part = replace(part, expression=expression, state=state)
        self._put(y, Entry(expression, part))

    def note_index(self, index: Tensor, axes: Sequence[str]) -> None:
        """Notes a rank's index, which is the same whenever a body asks for it."""
        if self._is_active:
            self._put(index, Entry(self._number(("index", *axes)), None))

    def note_copy(self, x: Tensor, y: Tensor) -> None:
        """Notes a copy."""
        if self._is_active:
            self._put(y, Entry(self._expression_of(x), self._part_of(x)))

    def note_gradient(
        self,
        outputs: Sequence[Tensor],
        seeds: Sequence[Tensor | None],
        operand: Tensor,
        gradient: Tensor,
        before: Tensor | None,
        has_custom_backward: bool,
    ) -> None:
        """Notes a gradient, which may be added to one that was there before.

        Raises:
            UnrelatedError: it is added to another expression, or to that of the same microbatches.
        """
        if not self._is_active:
            return
        old = None if before is None else self._part_of(before)
        parts = [self._part_of(x) for x in outputs]
        own = self._part_of(operand)
        first = next((part for part in (*parts, own) if part is not None), None)
        if first is not None and has_custom_backward:
            raise UnrelatedError(
                f"it is a gradient of {shown(first)}, and code of your own has worked on it",
                "apply it to the sum of all microbatches.",
            )
        skeletons = tuple(self._skeleton(x, operand) for x in outputs)
        exprs = tuple(map(self._expression_of, outputs))
        expression = self._number(("gradient", exprs, skeletons))
        part = None
        if first is not None:
            known = all(
                each is not None and each.group == first.group and each.indices == first.indices
                for each in (*parts, own or first)
            )
            additive = all(each is not None and each.state == "additive" for each in parts)
            if not known or len(first.indices) > 1:
                raise UnrelatedError(
                    "it is the gradient of a loss of several microbatches",
                    "take the gradient of each by itself, and add these up.",
                )
            plain = additive and not any(seed is not None for seed in seeds)
            state: State = "additive" if plain else "mixed"
            if own is not None:
                state = "rows" if plain and own.state == "rows" else "mixed"
            part = replace(first, expression=expression, state=state)
        if before is not None and (old is not None or part is not None):
            part = united(old, part)
            if part is None:
                raise UnrelatedError(
                    "it is added to a gradient in .grad that is not the same expression of other "
                    "microbatches",
                    _FIX,
                )
        storage = self._storage(gradient)
        self._versions[storage] = self._versions.get(storage, 0) + 1
        self._put(gradient, Entry(expression, None) if part is None else self._entry(part))

    def reject(self, tensor: Tensor) -> None:
        """Requires that a value does not depend on some microbatches only.

        Raises:
            UnrelatedError: it does.
        """
        part = self._part_of(tensor) if self._is_active else None
        if part is not None:
            raise UnrelatedError(
                f"it depends on {shown(part)}, which have other rows on one device", _FIX
            )

    def _skeleton(self, output: Tensor, operand: Tensor) -> int:
        """Returns a number of the graph from an output to an operand, which equal graphs share."""
        with self._interpreter.paused(), DisableTorchFunction():
            root, (target, number) = output.grad_fn, get_gradient_edge(operand)[:2]
        labels: dict[Node, int] = {}
        stack = [] if root is None else [root]
        while stack:
            node = stack[-1]
            if node in labels:
                stack.pop()
                continue
            missing = [n for n, _ in node.next_functions if n is not None and n not in labels]
            if missing:
                stack += missing
                continue
            edges = tuple(
                "operand"
                if (child, at) == (target, number)
                else (-1 if child is None else labels[child], at)
                for child, at in node.next_functions
            )
            labels[stack.pop()] = self._number((node.name(), edges))
        return labels.get(root, -1) if root is not None else -1

    # ------------------------------------------------------------------------------- notes

    def _entry(self, part: Part) -> Entry:
        """Returns the entry of a sum of microbatches: that of all is another expression."""
        if len(part.indices) < part.count:
            return Entry(part.expression, part)
        return Entry(self._number(("all", part.expression)), None)

    def _part_of(self, tensor: Tensor) -> Part | None:
        if not self._is_active:
            return None
        entry, storage = self._entries.get(tensor), self._storage(tensor)
        is_stale = entry is None or entry.version != self._versions.get(storage, 0)
        if is_stale and storage in self._touched:
            raise UnrelatedError("some of its memory depends on some microbatches only", _FIX)
        return None if is_stale or entry is None else entry.part

    def _expression_of(self, tensor: Tensor) -> int:
        entry, version = self._entries.get(tensor), self._versions.get(self._storage(tensor), 0)
        if entry is not None and entry.version == version:
            return entry.expression
        return self._number((TensorMap._key(tensor), version))

    def _put(self, tensor: Tensor, entry: Entry) -> None:
        storage = self._storage(tensor)
        if entry.part is not None:
            self._touched.add(storage)
        self._entries.put(tensor, replace(entry, version=self._versions.get(storage, 0)))

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _storage(self, tensor: Tensor) -> int:
        return int(base_of(self._interpreter.fakify(tensor)).untyped_storage()._cdata)


_REARRANGING: Final[
    Mapping[OpOverload, Callable[[Microbatches, Step, Any, Event], Rearranged | None]]
] = {
    aten.cat.default: Microbatches._concatenated,
    aten.stack.default: Microbatches._stacked,
    aten.select.int: Microbatches._taken,
    aten.unbind.int: Microbatches._taken,
}

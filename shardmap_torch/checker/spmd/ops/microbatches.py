"""Loops over microbatches: `x.chunk(n)` of a dim that ranks share, on ranks and on one device.

The i-th chunks of all ranks hold other rows than the i-th chunk of one device. Both programs divide
the same blocks of rows into n parts, so that what adds up, or puts one behind the other, the same
function of each part gives the same. A value that depends on some of the parts is compared as if
the rows were in the ranks' order. It counts as that of one device again when the same expression of
all n parts has been added up, and is additive in blocks of rows, or has been concatenated in order,
and keeps the rows. Until then nothing else may be done with more than one part.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from shardmap_torch.checker.interpreter.interpreter import Interpreter
from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.checker.rules.infer import Refusal, Types, signature_of, type_results, writes_of
from shardmap_torch.checker.spmd.layout import (
    UnrelatedError,
    axes_of,
    step_of,
    unsharded,
)
from shardmap_torch.checker.spmd.ops.chunks import CHUNKS, Chunks
from shardmap_torch.checker.spmd.recorder import Event, Ref, TensorMap
from shardmap_torch.checker.spmd.sharded import Sharded
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


State: TypeAlias = Literal["rows", "additive", "mixed"]


@dataclass(frozen=True)
class Part:
    """A value that depends on some microbatches.

    Attributes:
        count: how many there are.
        axes: those that shard the rows which were divided.
        indices: of the microbatches it depends on.
        expression: what it is of them, as a number that equal expressions share.
        state: "rows" where each rank's value is a function of its own rows; "additive" where the
            value on one device is the sum, or the mean, of those of blocks of rows; else "mixed".
    """

    count: int
    axes: tuple[str, ...]
    indices: frozenset[int]
    expression: int
    state: State

    @property
    def group(self) -> tuple[int, tuple[str, ...]]:
        """Returns what values must share to be of the same microbatches."""
        return self.count, self.axes


@dataclass(frozen=True)
class _Entry:
    expression: int
    part: Part | None
    version: int = 0


@dataclass(frozen=True)
class _Combined:
    """A call: its operands are parts of the same microbatches, or it adds them."""

    made: int
    parts: tuple[Part, ...] = ()
    added: Part | None = None
    is_linear: bool = False


class Microbatches:
    """Keeps what each tensor is of the microbatches."""

    def __init__(self, interpreter: Interpreter, notes: Notes) -> None:
        """Starts with no dim divided."""
        self._interpreter, self._notes = interpreter, notes
        self._is_active = False
        self._chunks = Chunks(0, 0, range(0))
        self._entries: TensorMap[_Entry] = TensorMap()
        self._versions: dict[int, int] = {}
        self._touched: set[int] = set()
        self._numbers: dict[Any, int] = {}

    # -------------------------------------------------------------------------- operations

    def divide(
        self, op: OpOverload, arguments: Mapping[str, Any], event: Event, shards: Mapping[str, Any]
    ) -> list[Sharded] | None:
        """Lays out chunks of a sharded dim; None where an operation does not make them."""
        if op not in CHUNKS:
            return None
        x = shards["self"]
        dim = arguments["dim"] % len(x.dims)
        axes = axes_of(x.dims[dim])
        leading = x.dims[dim][: len(axes)]
        if not axes or axes_of(leading) != axes:
            return None
        here = CHUNKS[op](arguments, x.local[dim])
        there = CHUNKS[op](event.arguments, x.global_shape[dim])
        if here is None or there is None or here.key != there.key or here.size == there.size:
            return None
        if self._part_of(arguments["self"]) is not None:
            raise UnrelatedError(
                "it divides a microbatch again", "divide the batch once, into all microbatches."
            )
        self._is_active, self._chunks = True, here
        found = (*x.dims[:dim], (*leading, *unsharded(here.size)), *x.dims[dim + 1 :])
        return [Sharded(found)] * len(here.indices)

    def concatenate(self, op: OpOverload, arguments: Mapping[str, Any]) -> list[Sharded] | None:
        """Lays out the concatenation of all microbatches; None where an operation is none."""
        if op is not aten.cat.default or not self._is_active:
            return None
        tensors = arguments["tensors"]
        parts = [self._part_of(x) for x in tensors]
        first = parts[0]
        if first is None or first.state != "rows":
            return None
        wanted = [replace(first, indices=frozenset({i})) for i in range(first.count)]
        shards = [self._notes.find_any(x) for x in tensors]
        x = shards[0]
        if parts != wanted or x is None or any(y is None or y.dims != x.dims for y in shards):
            return None
        dim = arguments["dim"] % len(x.dims)
        digits = x.dims[dim]
        leading = digits[: len(first.axes)]
        if axes_of(leading) != first.axes or axes_of(digits) != first.axes:
            return None
        rest = unsharded(x.local[dim] * first.count)
        return [Sharded((*x.dims[:dim], (*leading, *rest), *x.dims[dim + 1 :]))]

    def combine(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        event: Event,
        read: frozenset[str],
        results: Sequence[Tensor],
        special: bool,
    ) -> "_Combined | None":
        """Returns what an operation makes of its operands, before results and writes are noted.

        `special`: its results are laid out by `divide` or `concatenate`.

        Raises:
            UnrelatedError: microbatches are combined otherwise than by adding them up.
        """
        if not self._is_active:
            return None
        made = self._made(op, arguments, event)
        operands = [x for n, value in arguments.items() if n in read for x in tensors_in(value)]
        parts = [part for part in map(self._part_of, operands) if part is not None]
        if special or not parts:
            return _Combined(made)
        added = self._added(op, arguments, results)
        if added is not None:
            return _Combined(made, added=added)
        self._require_one(op, arguments, operands, parts, results)
        return _Combined(made, tuple(parts), is_linear=self._is_linear(op, arguments, results))

    def note(
        self,
        op: OpOverload,
        arguments: Mapping[str, Any],
        combined: "_Combined | None",
        results: Sequence[Tensor],
        special: bool,
    ) -> None:
        """Notes what the results of an operation are."""
        if combined is None:
            return
        if special and op in CHUNKS:
            self._note_chunks(arguments, results)
            return
        for name in writes_of(op, arguments):
            for x in tensors_in(arguments[name]):
                self._versions[self._storage(x)] = self._versions.get(self._storage(x), 0) + 1
        for index, result in enumerate(results):
            part = combined.added
            if part is not None:
                found = self._entry(part)
            else:
                expression = self._number((combined.made, index))
                found = _Entry(expression, self._made_part(combined, expression, result))
            self._put(result, found)

    def _note_chunks(self, arguments: Mapping[str, Any], results: Sequence[Tensor]) -> None:
        x, dim = arguments["self"], arguments["dim"]
        made = self._expression_of(x)
        self._put(x, _Entry(made, None))
        shard = self._notes.find_any(results[0])
        assert shard is not None  # it has just been noted
        axes = axes_of(shard.dims[dim % len(shard.dims)])
        expression = self._number(("chunk", made, dim % len(shard.dims), self._chunks.count))
        for i, result in zip(self._chunks.indices, results, strict=True):
            part = Part(self._chunks.count, axes, frozenset({i}), expression, "rows")
            self._put(result, _Entry(expression, part))

    def _made_part(self, combined: "_Combined", expression: int, result: Tensor) -> Part | None:
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
                    (name, self._frozen(value), _plain(event.arguments.get(name)))
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
        return _plain(value)

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
            return _united(one, other)
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
            raise UnrelatedError(f"it is not linear in {_shown(first)}", _FIX)
        for x in operands:
            shard = self._notes.find_any(x)
            if self._part_of(x) is not None or shard is None:
                continue
            own = {*shard.axes, *self._notes.sums(x).partial} & set(first.axes)
            if own or any(step_of(dim) is not None for dim in shard.dims):
                raise UnrelatedError(
                    f"it combines {_shown(first)} with a value that is sharded over "
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
                raise UnrelatedError(f"it is not linear in {_shown(part)}", _FIX)
            mixes = part.state == "rows" and not set(axes).isdisjoint(part.axes)
            state: State = "mixed" if mixes or move in EXTREMA else part.state
            part = replace(part, expression=expression, state=state)
        self._put(y, _Entry(expression, part))

    def note_copy(self, x: Tensor, y: Tensor) -> None:
        """Notes a copy."""
        if self._is_active:
            self._put(y, _Entry(self._expression_of(x), self._part_of(x)))

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
                f"it is a gradient of {_shown(first)}, and code of your own has worked on it",
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
            part = _united(old, part)
            if part is None:
                raise UnrelatedError(
                    "it is added to a gradient in .grad that is not the same expression of other "
                    "microbatches",
                    _FIX,
                )
        storage = self._storage(gradient)
        self._versions[storage] = self._versions.get(storage, 0) + 1
        self._put(gradient, _Entry(expression, None) if part is None else self._entry(part))

    def reject(self, tensor: Tensor) -> None:
        """Requires that a value does not depend on some microbatches only.

        Raises:
            UnrelatedError: it does.
        """
        part = self._part_of(tensor) if self._is_active else None
        if part is not None:
            raise UnrelatedError(
                f"it depends on {_shown(part)}, which have other rows on one device", _FIX
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

    def _entry(self, part: Part) -> _Entry:
        """Returns the entry of a sum of microbatches: that of all is another expression."""
        if len(part.indices) < part.count:
            return _Entry(part.expression, part)
        return _Entry(self._number(("all", part.expression)), None)

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

    def _put(self, tensor: Tensor, entry: _Entry) -> None:
        storage = self._storage(tensor)
        if entry.part is not None:
            self._touched.add(storage)
        self._entries.put(tensor, replace(entry, version=self._versions.get(storage, 0)))

    def _number(self, value: Any) -> int:
        return self._numbers.setdefault(value, len(self._numbers))

    def _storage(self, tensor: Tensor) -> int:
        return int(base_of(self._interpreter.fakify(tensor)).untyped_storage()._cdata)


def _united(one: Part | None, other: Part | None) -> Part | None:
    """Returns the sum of an expression of several microbatches; None where there is none."""
    if one is None or other is None or not one.indices.isdisjoint(other.indices):
        return None
    if replace(one, indices=other.indices) != other or one.state != "additive":
        return None
    return replace(one, indices=one.indices | other.indices)


def _shown(part: Part) -> str:
    which = ", ".join(map(str, sorted(part.indices)))
    return f"microbatches {which} of {part.count}"


_PLAIN: Final = (int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout)


def _plain(value: Any) -> Any:
    """Returns a key that equal arguments share; of what is not plain one of its own."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, _PLAIN) or isinstance(value, torch.memory_format):
        return type(value).__name__, value
    return None if isinstance(value, Ref) else object()

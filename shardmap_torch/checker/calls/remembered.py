"""Calls of one interpretation, remembered: layers of a network are the same calls, over and over.

A call is known by its operation, its arguments that are no tensors, and the shape, strides, dtype
and device of each that is one. All that depends on these alone is looked up, and so are the types
of its results, by those of its operands.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias

import torch
from torch import Tensor

from shardmap_torch.checker.calls.fake_results import PLAIN, Result, described, is_simple, make
from shardmap_torch.checker.rules.infer import Types, is_real, signature_of, tensors_of
from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    FakeTensor,
    FakeTensorMode,
    OpOverload,
)
from shardmap_torch.types import I, K, R

_SEEN: Final = "_shardmap_seen"
PLACE: Final = "_shardmap_place"
"""Fields in which tensors keep what is known of their metadata and memory."""

Seen: TypeAlias = tuple[FakeTensorMode, int, int, tuple[int, ...], torch.dtype]
"""Of a tensor: its mode, the number of its metadata, the address of its storage, shape, dtype."""

Literals: TypeAlias = tuple[tuple[str, Any], ...]
"""Arguments that are no tensors, by name."""

Situation: TypeAlias = tuple[Any, ...]
"""Types of operands, and all else on which those of a call's results depend."""


@dataclass(slots=True)
class CallLookup:
    """One call, as it is looked up.

    Attributes:
        key: equal for calls that are the same but for the values of their tensors.
        tensors: the operands, in the order of the arguments.
        seen: what is known of the metadata and memory of each.
    """

    key: tuple[Any, ...]
    tensors: list[FakeTensor]
    seen: list[Seen]


@dataclass(slots=True)
class Known:
    """Knowledge about all calls with one key.

    Attributes:
        op: the overload; kept, so that its address stays its own.
        name: the name of its equations.
        literals: its arguments that are no tensors.
        operands: for each operand, in the order of equations, the name and the position.
        result: its results, up to the values.
        is_view: whether they all are views of operands.
        is_real: whether some of them can have gradients.
        results: for each of them the number of its metadata, shape and dtype.
        outcomes: types and batched axes of its results, by `Situation`.
    """

    op: OpOverload
    name: str
    literals: Literals
    operands: tuple[tuple[str, int], ...]
    result: Result
    is_view: bool
    is_real: bool
    results: tuple[tuple[int, tuple[int, ...], torch.dtype], ...]
    outcomes: dict[Situation, tuple[Sequence[Types], frozenset[int]]] = field(default_factory=dict)


class Remembered:
    """The calls of one interpretation that may come again."""

    def __init__(self, mode: FakeTensorMode) -> None:
        """Knows no call; `mode` is that of the interpretation's tensors."""
        self._mode = mode
        self._numbers: dict[Any, int] = {}
        self._types: dict[int, tuple[Types, int, int]] = {}
        self._by_value: dict[Types, int] = {}
        self.calls: dict[tuple[Any, ...], Known] = {}

    def call(self, op: Any, args: Sequence[Any], kwargs: Any) -> CallLookup | None:
        """Reads a call; None if it is not known by the metadata of its operands."""
        found = CallLookup((), [], [])
        key: list[Any] = [id(op), torch.get_default_dtype()]
        if not self._add(key, args, found):
            return None
        for name, value in kwargs.items() if kwargs else ():
            key.append(name)
            if isinstance(value, Tensor | list | tuple) or not self._add(key, (value,), found):
                return None
        found.key = tuple(key)
        return found

    def _add(self, key: list[Any], values: Sequence[Any], found: CallLookup) -> bool:
        for value in values:
            cls = type(value)
            if cls is FakeTensor:
                seen = value.__dict__.get(_SEEN) or self._look_at(value)
                if seen is None or seen[0] is not self._mode:
                    return False
                key.append(seen[1])
                found.tensors.append(value)
                found.seen.append(seen)
            elif value is None:
                key.append(None)
            elif cls in PLAIN:
                key.append(cls)  # 1 and 1.0 are equal, as are 0.0 and -0.0
                key.append(value if cls is not float else value or str(value))
            elif cls is list or cls is tuple:
                key.append(cls)
                key.append(len(value))
                if not self._add(key, value, found):
                    return False
            else:
                return False
        return True

    def _look_at(self, tensor: FakeTensor) -> Seen | None:
        if tensor.fake_mode is not self._mode or not is_simple(tensor):
            return None
        shape = tuple(tensor.shape)
        number = self._number(tensor.dtype, shape, tensor.stride(), tensor.fake_device)
        seen = self._mode, number, tensor.untyped_storage()._cdata, shape, tensor.dtype
        tensor.__dict__[_SEEN] = seen
        return seen

    def _number(self, *described: Any) -> int:
        return self._numbers.setdefault(described, len(self._numbers))

    def learn(
        self, call: CallLookup, op: OpOverload, literals: Literals, args: Sequence[Any], key: Any
    ) -> Known | None:
        """Remembers a call; `key` is that of its result. None if that does not say all of it."""
        result = described(key)
        if result is None or None in result.items:
            return None
        items = [item for item in result.items if item is not None]
        views = {item.operand is not None for item in items}
        if len(views) > 1 or (not views and result.container is not None):
            return None
        numbers = [self._number(x.dtype, x.shape, x.stride, x.device) for x in items]
        results = zip(numbers, (x.shape for x in items), (x.dtype for x in items), strict=True)
        known = Known(
            op,
            op._schema.name.split("::")[1],
            literals,
            tuple(_named(op, args)),
            result,
            True in views,
            any(is_real(item.dtype) for item in items),
            tuple(results),
        )
        self.calls[call.key] = known
        return known

    def make(self, known: Known, call: CallLookup) -> tuple[Any, list[FakeTensor], list[int]]:
        """Makes the results of a call; returns them, as a list too, and their storages."""
        out = make(self._mode, known.result, call.tensors)
        made = [] if not known.results else [out] if known.result.container is None else [*out]
        storages = []
        for each, (number, shape, dtype) in zip(made, known.results, strict=True):
            storage = each.untyped_storage()._cdata
            each.__dict__[_SEEN] = self._mode, number, storage, shape, dtype
            storages.append(storage)
        return out, made, storages

    def number_of(self, types: Types) -> tuple[Types, int, int]:
        """Returns the types, a number for them, and one for them with K in place of I and R."""
        known = self._types.get(id(types))
        if known is None:
            free = tuple(K if each in (I, R) else each for each in types)
            number, freed = (
                self._by_value.setdefault(t, len(self._by_value)) for t in (types, free)
            )
            # Kept with what it is known by, so that no other tuple gets its address.
            known = self._types[id(types)] = types, number, freed
        return known


def address_of(tensor: Tensor) -> int:
    """Returns the address of a base tensor's storage, without asking torch where it is known."""
    seen = tensor.__dict__.get(_SEEN)
    if seen is not None:
        return int(seen[2])
    with DisableTorchFunction():  # which would see a question of the checker's own
        return int(tensor.untyped_storage()._cdata)


def forget_written(op: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """Forgets the metadata of tensors that an operation may change in place."""
    if op._schema.is_mutable:
        for value in (*args, *kwargs.values()):
            for tensor in tensors_of(value):
                fields = base_of(tensor).__dict__
                fields.pop(_SEEN, None)
                fields.pop(PLACE, None)


def _named(op: OpOverload, args: Sequence[Any]) -> list[tuple[str, int]]:
    """Returns name and position of each operand, in the order of `name_arguments`."""
    signature, at = signature_of(op), 0
    found: dict[str, list[tuple[str, int]]] = {name: [] for name in signature.defaults}
    for name, value in zip(signature.names, args, strict=False):
        items = value if isinstance(value, list | tuple) else (value,)
        places = [place for place, item in enumerate(x for x in items if isinstance(x, Tensor))]
        found[name] = [(name, at + place) for place in places]
        at += len(places)
    return [each for places in found.values() for each in places]

"""Origins: from which arguments the values of a run come, and within which bounds they are."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.ir.observer import tensors_in
from shardmap_torch.core.torch_private.engine import OpOverload
from shardmap_torch.run.trials import operators
from shardmap_torch.run.trials.operators import Bounds

Origin = tuple[int, int]
"""The position of an integer argument, and what has been added to its entries."""

Places = frozenset[Origin]

_MAX_PLACES: Final = 64


@dataclass(eq=False)
class Origins:
    """Origins of the values of a run: inputs, or numbers that every call of the body has.

    Known by storage; storages are held, so that no other one gets their address.
    """

    _held: list[torch.UntypedStorage] = field(default_factory=list)
    _fixed: set[int] = field(default_factory=set)
    _derived: dict[int, Places] = field(default_factory=dict)
    _bounds: dict[int, Bounds] = field(default_factory=dict)
    _unordered: set[int] = field(default_factory=set)

    def is_fixed(self, x: Tensor) -> bool:
        """Returns whether a tensor depends on no input."""
        return _address(x) in self._fixed

    def is_unordered(self, x: Tensor) -> bool:
        """Returns whether a tensor depends on the order of equal entries: torch has none."""
        return _address(x) in self._unordered

    def entries_of(self, tensors: Iterable[Tensor]) -> Places:
        """Returns the arguments whose entries tensors have, but for what was added."""
        return Places().union(*[self._derived.get(_address(x), Places()) for x in tensors])

    def bounds_of(self, value: Any) -> Bounds | None:
        """Returns the bounds of a number or tensor; None if nothing is known."""
        if isinstance(value, Tensor) and not self.is_fixed(value):
            return self._bounds.get(_address(value))
        found = operators.integers_of(value)
        return (min(found), max(found)) if found else None

    def bound(self, x: Tensor, bounds: Bounds | None) -> None:
        """Notes the bounds of a tensor that nothing is written into later."""
        if bounds is not None:
            self._bounds[_address(x)] = bounds

    def note(self, x: Tensor, fixed: bool, entries_of: Places, is_unordered: bool = False) -> None:
        """Notes what was written into a tensor."""
        address = _address(x)
        self._unordered |= {address} if is_unordered else set()
        self._bounds.pop(address, None)
        self._held.append(x.untyped_storage())
        if fixed:
            self._fixed.add(address)
            return
        self._fixed.discard(address)
        places = self._derived.get(address, Places()) | entries_of
        self._derived[address] = places if len(places) <= _MAX_PLACES else Places()


Key = tuple[Any, ...]


class Entries:
    """Entries that are the same one, wherever a run has moved it: they are equal for all inputs.

    Looked up where two are compared; till then only how tensors were made is kept.
    """

    def __init__(self) -> None:
        self._writes: Counter[int] = Counter()
        self._made: dict[Key, tuple[OpOverload, dict[str, Any], int]] = {}
        self._numbers: dict[Key, Tensor] = {}
        self._count = 0

    def carry(self, op: OpOverload, arguments: Mapping[str, Any], out: Sequence[Tensor]) -> None:
        """Notes that an operator moves the entries of its operands."""
        if operators.name_of(op) in operators.CARRYING:
            given = {name: self._refer(value) for name, value in arguments.items()}
            for place, x in enumerate(out):
                if _Moved(self._key(x)) not in given.values():  # a view of all is no other one
                    self._made.setdefault(self._key(x), (op, given, place))

    def write(self, x: Tensor) -> None:
        """Notes that a tensor is written, after which its memory has other entries."""
        self._writes[_address(x)] += 1

    def are_same(self, x: Tensor, y: Tensor) -> Tensor:
        """Returns where two tensors have the same entry."""
        mine, other = self._numbered(self._key(x)), self._numbered(self._key(y))
        return (mine == other) & (mine >= 0)

    def _refer(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._refer(each) for each in value]
        return _Moved(self._key(value)) if isinstance(value, Tensor) else value

    def _numbered(self, key: Key) -> Tensor:
        """Returns a number for each entry; of those that are no input's -1."""
        if key not in self._numbers and key in self._made:
            op, given, place = self._made[key]
            values = {name: self._value(value) for name, value in given.items()}
            if "value" in values:
                values["value"] = -1
            self._numbers[key] = tensors_in(op(**values))[place]
        if key not in self._numbers:
            count = prod(key[-1])
            self._numbers[key] = torch.arange(self._count, self._count + count).view(key[-1])
            self._count += count
        return self._numbers[key]

    def _value(self, value: Any) -> Any:
        if isinstance(value, list):
            return [self._value(each) for each in value]
        return self._numbered(value.key) if isinstance(value, _Moved) else value

    def _key(self, x: Tensor) -> Key:
        address = _address(x)
        return address, self._writes[address], x.storage_offset(), x.stride(), tuple(x.shape)


@dataclass(frozen=True)
class _Moved:
    key: Key


def _address(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address

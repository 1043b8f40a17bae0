"""Origins: from which arguments the values of a run come, and within which bounds they are."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

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

    def is_fixed(self, x: Tensor) -> bool:
        """Returns whether a tensor depends on no input."""
        return _address(x) in self._fixed

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

    def note(self, x: Tensor, fixed: bool, entries_of: Places) -> None:
        """Notes what was written into a tensor."""
        address = _address(x)
        self._bounds.pop(address, None)
        self._held.append(x.untyped_storage())
        if fixed:
            self._fixed.add(address)
            return
        self._fixed.discard(address)
        places = self._derived.get(address, Places()) | entries_of
        self._derived[address] = places if len(places) <= _MAX_PLACES else Places()


def _address(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address

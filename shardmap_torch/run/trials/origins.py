"""Origins of the values of a run: inputs, or numbers that every call of the body has."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import torch
from torch import Tensor

Places = frozenset[int]
"""Positions of arguments."""


@dataclass(eq=False)
class Origins:
    """The origins of storages, which are kept, so that no other one gets their address."""

    _kept: list[torch.UntypedStorage] = field(default_factory=list)
    _fixed: set[int] = field(default_factory=set)
    _derived: dict[int, Places] = field(default_factory=dict)

    def enter(self, x: Tensor, position: int) -> None:
        """Notes an argument."""
        self.note(x, False, frozenset({position}))

    def is_fixed(self, x: Tensor) -> bool:
        """Returns whether a tensor depends on no input."""
        return _address(x) in self._fixed

    def entries_of(self, tensors: Iterable[Tensor]) -> Places:
        """Returns the arguments whose entries tensors have, unchanged."""
        return Places().union(*[self._derived.get(_address(x), Places()) for x in tensors])

    def note(self, x: Tensor, fixed: bool, entries_of: Places) -> None:
        """Notes what was written into a tensor."""
        address = _address(x)
        self._kept.append(x.untyped_storage())
        if fixed:
            self._fixed.add(address)
            return
        self._fixed.discard(address)
        self._derived[address] = self._derived.get(address, Places()) | entries_of


def _address(x: Tensor) -> int:
    address: int = x.untyped_storage()._cdata
    return address

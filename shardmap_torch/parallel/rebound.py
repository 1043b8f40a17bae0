"""Code that refers to a module, made to refer to another one: patched forwards, hooks, closures."""

from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType
from typing import Any, Final

from shardmap_torch.core.closures import is_empty, with_cells

_TABLES: Final = (dict, OrderedDict)
_PLAIN: Final = frozenset({int, float, bool, str, bytes, type(None), type})


class Rebinding:
    """Values in which other modules and tensors stand for those that they refer to.

    Methods, partials, functions with their closures and defaults, and containers are copied where
    they refer to one; everything else stays what it is.
    """

    def __init__(self, other: Callable[[Any], Any]) -> None:
        """Takes the function that returns what stands for a value: itself, for most."""
        self._other = other
        self._pending: set[int] = set()

    def __call__(self, value: Any) -> Any:
        """Returns the value, or a copy that refers to others."""
        remake = _REMAKES.get(type(value))
        if remake is None:
            return value if type(value) in _PLAIN else self._of_leaf(value)
        if id(value) in self._pending:  # it refers to itself
            return value
        self._pending.add(id(value))
        try:
            return remake(self, value)
        finally:
            self._pending.remove(id(value))

    def _of_leaf(self, value: Any) -> Any:
        if hasattr(type(value), "rebound"):
            return value.rebound(self, self._other)
        return self._other(value)

    def _items(self, value: Any) -> Any:
        items = [self(item) for item in value]
        return value if all(map(is_, items, value)) else type(value)(items)

    def _table(self, value: Any) -> Any:
        items = self._items(list(value.values()))
        is_same = all(map(is_, items, value.values()))
        return value if is_same else type(value)(zip(value, items, strict=True))

    def _method(self, value: MethodType) -> Any:
        owner = self(value.__self__)
        return value if owner is value.__self__ else MethodType(value.__func__, owner)

    def _partial(self, value: "partial[Any]") -> Any:
        parts = value.func, value.args, value.keywords
        others = self._items(parts)
        if others is parts:
            return value
        copy = partial(others[0], *others[1], **others[2])
        vars(copy).update(vars(value))
        return copy

    def _function(self, value: FunctionType) -> Any:
        cells = {}
        for cell in value.__closure__ or ():
            held = None if is_empty(cell) else cell.cell_contents
            if (other := self(held)) is not held:
                cells[id(cell)] = CellType(other)
        defaults = value.__defaults__, value.__kwdefaults__
        others = self._items(defaults)
        if not cells and others is defaults:
            return value
        copy = with_cells(value, cells)
        copy.__defaults__, copy.__kwdefaults__ = others
        return copy


_REMAKES: Final[dict[type, Callable[[Rebinding, Any], Any]]] = {
    **dict.fromkeys((list, tuple), Rebinding._items),
    **dict.fromkeys(_TABLES, Rebinding._table),
    MethodType: Rebinding._method,
    partial: Rebinding._partial,
    FunctionType: Rebinding._function,
}

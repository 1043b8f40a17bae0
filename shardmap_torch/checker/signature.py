"""What a verdict depends on: equal signatures have equal programs."""

import builtins
import sys
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import is_
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardmap_torch.boundary import Call, can_receive_gradient
from shardmap_torch.checker.table import table_version

_PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_LIMIT: Final = 10_000
"""How much is followed; what lies farther counts by the identity of what refers to it."""
_LIBRARIES: Final = frozenset({*sys.stdlib_module_names, "torch", "shardmap_torch", "numpy"})
_DEVICES: Final = ("cpu", "cuda")


def signature(call: Call, surroundings: "Surroundings") -> Hashable:
    """All that a verdict on `call` depends on and that can be seen from outside the body."""
    return (
        call.structure,
        call.mesh,
        call.mapped,
        call.bound,
        call.fit,
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        table_version(),
        tuple(
            (torch.is_autocast_enabled(d), torch.get_autocast_dtype(d))
            for d in _DEVICES
            if torch.is_autocast_enabled(d)
        ),
        *map(_leaf, call.leaves),
        surroundings.key(),
    )


def _leaf(leaf: Any) -> Hashable:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.device, can_receive_gradient(leaf)
    return type(leaf), leaf


class Surroundings:
    """What the code of a function refers to: closed-over values, defaults, globals, attributes.

    Plain values count by value, everything else by identity; tensors also by whether they require
    a gradient. Functions of the user's own are followed, and so are containers, modules and the
    attributes of the objects that are referred to. A look-up compares identities, and follows
    everything again only where one has changed.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """One for each function; nothing is looked at before the first call."""
        self._function = function
        self._key: Hashable = None
        self._tensors: list[Tensor] = []

    def key(self) -> Hashable:
        """Equal as long as nothing has changed."""
        if self._key is None or not self._is_unchanged():
            self._follow_all()
        return self._key, tuple([tensor.requires_grad for tensor in self._tensors])

    @property
    def tensors(self) -> Sequence[Tensor]:
        """Those that were found, after `key`."""
        return self._tensors

    def _is_unchanged(self) -> bool:
        for table, name, value in self._entries:
            if table.get(name) is not value:
                return False
        for cell, value in self._cells:
            if cell.cell_contents is not value:
                return False
        return all(
            len(items) == len(was) and all(map(is_, items, was)) for items, was in self._lists
        )

    def _follow_all(self) -> None:
        self._entries: list[tuple[Mapping[Any, Any], Any, Any]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._lists: list[tuple[Sequence[Any], tuple[Any, ...]]] = []
        self._tensors = []
        found: list[Hashable] = []
        seen: set[int] = set()
        self._pending: list[Any] = [self._function]
        while self._pending and len(found) < _LIMIT:
            value = self._pending.pop()
            if isinstance(value, _PLAIN):
                found.append((type(value), value))
                continue
            found.append(id(value))
            if id(value) not in seen and not isinstance(value, ModuleType | type):
                seen.add(id(value))
                self._enter(value)
        self._key = tuple(found)

    def _enter(self, value: Any) -> None:
        """Follows what an object refers to."""
        if isinstance(value, Tensor):
            self._tensors.append(value)
        elif isinstance(value, FunctionType):
            self._enter_function(value)
        elif isinstance(value, MethodType):
            self._pending += [value.__func__, value.__self__]
        elif isinstance(value, partial):
            self._pending += [value.func, value.args, value.keywords]
        elif isinstance(value, tuple | list):
            self._lists.append((value, tuple(value)))
            self._pending += value
        elif isinstance(value, dict):
            self._enter_table(value, list(value))
        elif not _is_library(type(value)) or isinstance(value, nn.Module):
            table = getattr(value, "__dict__", {})
            self._enter_table(table, list(table))

    def _enter_table(self, table: Mapping[Any, Any], names: Sequence[Any]) -> None:
        self._entries += [(table, name, table[name]) for name in names]
        self._pending += [table[name] for name in names]

    def _enter_function(self, function: FunctionType) -> None:
        if _is_library(function):
            return
        for cell in function.__closure__ or ():
            try:
                value = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self._cells.append((cell, value))
            self._pending.append(value)
        self._pending += function.__defaults__ or ()
        table = function.__globals__
        names = [name for name in _names(function.__code__) if name in table]
        self._enter_table(table, names)


def _names(code: CodeType) -> list[str]:
    """Names that the code, and the functions in it, may look up outside."""
    names = [name for name in code.co_names if not hasattr(builtins, name)]
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names += _names(constant)
    return names


def _is_library(value: Any) -> bool:
    module = getattr(value, "__module__", None) or ""
    return str(module).split(".")[0] in _LIBRARIES

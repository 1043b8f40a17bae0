"""Functions of libraries that have been replaced, which no version number shows."""

import builtins
import math
from collections.abc import Iterator, Mapping
from operator import is_
from types import BuiltinFunctionType, FunctionType
from typing import Any, Final

import torch

from shardmap_torch.checker.guards.libraries import is_library_name

Table = Mapping[str, Any]


def _tables() -> Iterator[Table]:
    """Yields the attributes of modules and classes whose functions bodies mostly call."""
    for module in (builtins, math, torch, torch.nn.functional, torch.linalg, torch.special):
        yield vars(module)
    for cls in (torch.Tensor, torch.autograd.Function, *vars(torch.nn).values()):
        if isinstance(cls, type):
            yield vars(cls)


def _functions(table: Table) -> dict[str, Any]:
    """Returns the functions; what is imported later adds modules and classes."""
    functions = (FunctionType, BuiltinFunctionType)
    named = ((name, x) for name, x in table.items() if name[0] != "_" or name[:2] == "__")
    return {name: value for name, value in named if isinstance(value, functions)}


def _is_own(value: FunctionType) -> bool:
    """Returns whether code of a library made it; decorators copy names, but not globals."""
    return is_library_name(value.__globals__.get("__name__"))


_FOUND: Final = [(table, _functions(table)) for table in _tables()]
"""Tables, with their functions when this module was imported."""

_FOREIGN: Final = [
    name
    for _, functions in _FOUND
    for name, value in functions.items()
    if isinstance(value, FunctionType) and not _is_own(value)
]
"""Names of functions that were replaced by then."""


def patches() -> Iterator[str]:
    """Yields the names of functions of torch, `math` and Python that are others than theirs.

    Functions that a class has been given, as operators of tensors, count too.
    """
    yield from _FOREIGN
    for table, was in _FOUND:
        if not all(map(is_, map(table.get, was), was.values())):
            yield from (name for name, value in was.items() if _differs(name, table, value))
        if not isinstance(table, dict):
            added = {name: x for name, x in _functions(table).items() if name not in was}
            yield from (name for name, x in added.items() if not _is_named(name, x))


def _differs(name: str, table: Table, was: Any) -> bool:
    """Returns whether a function is another; torch wraps some of its own when it compiles."""
    now = table.get(name)
    return now is not was and not _is_named(was.__name__, now)


def _is_named(name: str, value: Any) -> bool:
    """Returns whether a library has made a function for this name, as torch does to compile."""
    if not isinstance(value, FunctionType):
        return False
    made_in = str(value.__globals__.get("__name__"))
    return made_in.startswith("torch._dynamo.") or (_is_own(value) and value.__name__ == name)

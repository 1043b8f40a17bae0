"""Code: the names in a function's bytecode, and whose code it is, a user's or a library's."""

import argparse
import dis
import site
import sys
import sysconfig
from collections import ChainMap, UserDict, UserList
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from types import CodeType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any, Final, NamedTuple

import torch
from torch import nn

_OWN: Final = str(Path(__file__).parents[2])
_SITES: Final = tuple(
    f"{folder}/"
    for folder in (
        *(sysconfig.get_path("purelib"), sysconfig.get_path("platlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
    )
)
"""Folders of distributions that are installed, unless in place."""
_LIBRARIES: Final = (
    *(*_SITES, f"{_OWN}/", str(Path(torch.__file__).parent), sysconfig.get_path("stdlib")),
    *("<frozen ", "<__array_function__"),
)
_OPEN: Final = (
    *(nn.Module, torch.optim.Optimizer, argparse.Namespace, SimpleNamespace),
    *(ChainMap, UserDict, UserList),
)
"""Classes of Python and torch whose objects have data of a user's."""
_CLOSED: Final = (*sys.stdlib_module_names, "torch", Path(_OWN).name)
"""Packages whose other objects have none: loggers, locks, caches, verdicts."""
_BY_TEXT: Final = frozenset({"globals", "eval", "exec", "f_globals"})
"""Names by which code reads globals that its strings name."""
_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


class Names(NamedTuple):
    """Names in code and in the functions that it has.

    Attributes:
        globals: variables that it reads outside of functions.
        others: those, attributes, imported modules, and strings that could be names.
    """

    globals: tuple[str, ...]
    others: tuple[str, ...]


@lru_cache(maxsize=4096)
def names_in(code: CodeType) -> Names:
    """Finds the names in code and in the functions that it has."""
    globals_: dict[str, None] = {}
    others: dict[str, None] = {}
    texts: dict[str, None] = {}
    for each in _codes(code):
        loads = [str(i.argval) for i in dis.get_instructions(each) if i.opname in _LOADS]
        globals_ |= dict.fromkeys(loads)
        others |= dict.fromkeys(each.co_names)
        constants = [text for text in each.co_consts if isinstance(text, str)]
        texts |= dict.fromkeys(text for text in constants if text.isidentifier())
    read = {**globals_, **texts} if _BY_TEXT & others.keys() else globals_
    return Names((*read,), (*others, *texts))


def _codes(code: CodeType) -> Iterator[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def imported_by(function: FunctionType) -> list[ModuleType]:
    """Returns the modules that a function imports when it runs, also relatively."""
    package = function.__globals__.get("__package__") or ""
    _, names = names_in(function.__code__)
    found = [sys.modules.get(full) for name in names for full in (name, f"{package}.{name}")]
    return [module for module in found if isinstance(module, ModuleType)]


class Origins:
    """Tells a user's code from that of libraries.

    The package of the function itself counts as the user's, also where it is installed.
    """

    def __init__(self, function: Callable[..., Any] | None) -> None:
        file = _file_of(function)
        where = next((folder for folder in _SITES if file.startswith(folder)), "")
        package = file.removeprefix(where).split("/")[0] if where else ""
        self._home = f"{where}{package}" if package and package not in _CLOSED else None

    def is_library(self, file: str) -> bool:
        """Returns whether a file is one of Python, torch, this or another installed package."""
        return file.startswith(_LIBRARIES) and not (self._home and file.startswith(self._home))

    def is_of_library(self, module: str) -> bool:
        """Returns whether the module of a name is a library's."""
        file = _file_of_module(module)
        if file:
            return self.is_library(file)
        return module in sys.modules and module.split(".")[0] in sys.stdlib_module_names

    def is_closed(self, kind: type) -> bool:
        """Returns whether the objects of a class are compared by identity."""
        module = module_of(kind)
        if issubclass(kind, _OPEN) or module.split(".")[0] not in _CLOSED:
            return False
        return self.is_of_library(module)


def module_of(kind: type) -> str:
    """Returns the name of the module of a class, without a question to its metaclass."""
    name = vars(kind).get("__module__")
    return name if isinstance(name, str) else "builtins"


def _file_of(function: Callable[..., Any] | None) -> str:
    function = function.__func__ if isinstance(function, MethodType) else function
    if isinstance(function, FunctionType):
        return function.__code__.co_filename
    return _file_of_module(module_of(type(function)))


def _file_of_module(name: str) -> str:
    module = sys.modules.get(name)
    return str(vars(module).get("__file__") or "") if isinstance(module, ModuleType) else ""

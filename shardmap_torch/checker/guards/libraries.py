"""Libraries: modules whose objects count as unchanging, recognised by name."""

import site
import sys
import sysconfig
from collections.abc import Collection, Iterator
from types import FunctionType, ModuleType
from typing import Any, Final

OWN: Final = __name__.split(".")[0]
"""This package."""
_LIBRARIES: Final = frozenset(
    {
        *sys.stdlib_module_names,
        *(OWN, "torch", "numpy", "optree"),
        # Rewritten assertions in test modules refer to all of pytest.
        *("_pytest", "pytest", "pluggy", "hypothesis"),
    }
)
_BUSY: Final = frozenset({"asyncio", "concurrent", "logging", "multiprocessing", "threading"})
"""Standard modules whose objects change by themselves, and have no state of a body."""
STANDARD: Final = sys.stdlib_module_names - _BUSY
"""Standard modules whose objects may have state of a body."""
_SITES: Final = tuple(
    f"{folder}/"
    for folder in {
        *(sysconfig.get_path("purelib"), sysconfig.get_path("platlib")),
        *(*site.getsitepackages(), site.getusersitepackages()),
    }
)
"""Folders of distributions that are installed, unless in place."""


def is_library(value: Any) -> bool:
    """Returns whether a library defines an object, or its class."""
    return root_of(value) in _LIBRARIES


def is_library_name(module: object) -> bool:
    """Returns whether a module of this name is a library's."""
    return str(module).split(".")[0] in _LIBRARIES


def root_of(value: Any) -> str:
    """Returns the name of the top package of a module, or of what defines an object."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name or "").split(".")[0]


def is_installed(value: Any) -> bool:
    """Returns whether an installed distribution defines an object, and not in place."""
    return str(getattr(_module_of(value), "__file__", None)).startswith(_SITES)


def _module_of(value: Any) -> ModuleType | None:
    return sys.modules.get(str(getattr(value, "__module__", None)))


def switches_of(values: Collection[Any]) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Yields what decides what installed functions and classes do, and a user may set.

    That are the plain values in all modules of their packages, and the functions and classes in
    their own modules, each with its table and name.
    """
    own, packages = {*map(_module_of, values)}, {*map(root_of, values)}
    modules = [x for name, x in tuple(sys.modules.items()) if name.split(".")[0] in packages]
    for module in filter(None, modules):
        kinds = (*_VALUES, FunctionType, type) if module in own else _VALUES
        for name, each in tuple(vars(module).items()):
            if type(each) in kinds and not name.startswith("__"):
                yield vars(module), name, each


_VALUES: Final = (bool, int, float, str, type(None))

"""Libraries: modules whose objects count as unchanging, told from the user's own by name."""

import sys
from types import ModuleType
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

"""Objects of libraries that change: arrays of numbers, generators of numbers, clocks.

Arrays are compared by their content. Of the others only repeated checks can tell whether the
program depends on them.
"""

import array
import datetime
import os
import random
import secrets
import time
import types
import uuid
from collections.abc import Mapping
from typing import Any, Final

_MOST: Final = 4096
"""Maximal number of bytes that each call compares with those of the check, in less than 1 us."""

DICT_VIEWS: Final[tuple[type, ...]] = (type({}.keys()), type({}.values()), type({}.items()))

_CLOCKS: Final[Mapping[str, tuple[types.ModuleType, tuple[str, ...]]]] = {
    "time": (
        time,
        tuple(
            f"{clock}{unit}"
            for clock in ("time", "perf_counter", "monotonic", "process_time", "thread_time")
            for unit in ("", "_ns")
        ),
    ),
    "uuid": (uuid, ("uuid1", "uuid4")),
    "secrets": (secrets, ("randbelow", "randbits", "token_bytes", "token_hex", "choice")),
    "os": (os, ("urandom", "times")),
    "datetime": (datetime, ("datetime", "date")),
}
CHANGING_MODULES: Final[Mapping[str, Mapping[str, Any]]] = {
    name: {each: getattr(module, each) for each in names}
    for name, (module, names) in _CLOCKS.items()
}
"""Of modules of the standard library the functions and classes that give a value of their own."""
_CHANGING: Final = frozenset(
    id(value) for table in CHANGING_MODULES.values() for value in table.values()
)


def is_array(value: Any) -> bool:
    """Returns whether an object is an array, whose content is compared."""
    kind = type(value)
    return kind in (bytearray, array.array) or (kind.__module__, kind.__name__) == _NUMPY_ARRAY


_NUMPY_ARRAY: Final = ("numpy", "ndarray")  # numpy need not be there


def content_of(value: Any) -> bytes:
    """Returns the content of a small array; nothing for one that is large, or has objects."""
    has_objects = hasattr(value, "dtype") and value.dtype.hasobject
    if has_objects or memoryview(value).nbytes > _MOST:
        return b""
    return bytes(value) if isinstance(value, bytearray) else bytes(value.tobytes())


def gives_other_values(value: Any) -> bool:
    """Returns whether an object may give another value whenever it is asked."""
    is_generator = isinstance(value, random.Random) or type(value).__module__ in _NUMPY_RANDOM
    return hasattr(value, "__next__") or is_generator or id(value) in _CHANGING


_NUMPY_RANDOM: Final = ("numpy.random._generator", "numpy.random.mtrand")

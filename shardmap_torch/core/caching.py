"""Caches that torch.compile can trace: lazy attributes, memoised functions, constants.

Dynamo warns of functools.lru_cache, cannot trace the lock of functools.cached_property in Python
3.11, and allows a Function no side effects. So nothing is cached while it traces.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import wraps
from typing import Any, Final, Generic, TypeVar

import torch

O_ = TypeVar("O_")
T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., Any])


class lazy(Generic[O_, T]):  # noqa: N801 - a decorator, like property
    """An attribute that is computed when it is first read."""

    def __init__(self, compute: Callable[[O_], T]) -> None:
        self._compute = compute
        self.__doc__ = compute.__doc__

    def __get__(self, instance: O_, owner: type[O_]) -> T:
        """Computes and stores the value; called only while the instance has none of that name."""
        value = self._compute(instance)
        if not torch.compiler.is_dynamo_compiling():
            instance.__dict__[self._compute.__name__] = value
        return value


class Unguarded(Generic[T]):
    """A value that never changes: Dynamo reads it without a guard on each part that it reads.

    Thousands of these would be compared in each compiled call. Dynamo takes the annotations of
    functions for unchanged, and looks at the identity of what is passed to a constant.
    """

    def __init__(self, value: T) -> None:
        """Keeps the value; not while Dynamo traces."""

        def holder() -> None:
            """Has annotations."""

        holder.__annotations__ = {"value": value}
        self._holder = holder

    @property
    def value(self) -> T:
        """The value."""
        _identify(self)
        value: T = self._holder.__annotations__["value"]
        return value


_UNKNOWN: Final[Any] = object()


class Memo(Generic[T]):
    """Cache of the results of the latest keys; keys that cannot be hashed are not cached.

    Example:
        >>> squares = Memo[int]()
        >>> squares.get(3, lambda: 3 * 3), squares.get(3, lambda: 1 / 0)
        (9, 9)
    """

    def __init__(self, limit: int = 1024) -> None:
        """Makes a cache that drops the oldest result above `limit`."""
        self._limit = limit
        self._known: dict[Any, T] = {}

    def get(self, key: Any, make: Callable[[], T]) -> T:
        """Returns the result of this key, made by `make` if not cached; errors are not cached."""
        if torch.compiler.is_dynamo_compiling():
            return make()
        try:
            known: T = self._known.get(key, _UNKNOWN)
        except Exception:  # no hash: such as the metadata of a user's own kind of pytree node
            return make()
        if known is not _UNKNOWN:
            return known
        result = make()
        self.put(key, result)
        return result

    def put(self, key: Any, result: T) -> None:
        """Keeps the result of a hashable key."""
        if len(self._known) >= self._limit:
            drop_oldest(self._known)
        self._known[key] = result

    def find(self, key: Any) -> T | None:
        """Returns the result of a key, or None; None for one that cannot be hashed."""
        try:
            return self._known.get(key)
        except Exception:  # as in `get`
            return None

    def forget(self, key: Any) -> None:
        """Drops the result of this key."""
        self._known.pop(key, None)


def drop_oldest(table: dict[Any, Any]) -> None:
    """Drops the oldest entry of a table; none where another thread changes it at this moment."""
    with suppress(RuntimeError, StopIteration):
        table.pop(next(iter(table)), None)


def memo(function: F) -> F:
    """Decorates a function of hashable positional arguments so that its results are cached.

    Example:
        >>> @memo
        ... def double(x):
        ...     print("computing")
        ...     return x + x
        >>> double(2), double(2)
        computing
        (4, 4)
    """
    known = Memo[Any]()

    @wraps(function)
    def remembered(*args: Any) -> Any:
        return known.get(args, lambda: function(*args))

    return remembered  # type: ignore[return-value]  # it takes and gives the same


def constant(function: F) -> F:
    """Decorates a function so that Dynamo calls it instead of tracing it: its result is a constant.

    Does what torch.compiler.assume_constant_result does, without the second to import Dynamo.
    """
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@constant
def _identify(held: Unguarded[Any]) -> None:
    """Does nothing: Dynamo guards the identity of an object that it passes to a constant."""

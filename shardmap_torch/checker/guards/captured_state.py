"""Captured state: finds what a function's code refers to, and detects changes of it.

A look-up compares identities. The walk is repeated only if one has changed.
"""

import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from operator import attrgetter
from typing import Any, Final

from torch import Tensor

from shardmap_torch.checker.guards.walk import Walk, name_of

_COSTLY: Final = 20_000
"""Number of values that each call compares without a warning; they take about 1 ms."""
_VERSIONS: Final = 16
"""Number of states whose versions are kept."""
_METADATA: Final = attrgetter("requires_grad", "dtype", "shape")
"""Gets what may change of a tensor in place."""
_OF_NESTED: Final = attrgetter("requires_grad", "dtype")
"""Gets what of it nested tensors have."""


class Surroundings:
    """State that the code of a function refers to: closures, defaults, globals, attributes.

    The walk enters the user's own functions and classes, the names that the code uses of the user's
    own modules, containers, modules of torch.nn, context variables, results that functools.cache
    keeps, and the attributes of objects, including tensors.
    Plain values are compared by value, tensors by the properties that a verdict can depend on, all
    others by identity.
    """

    def __init__(self, function: Callable[..., Any], versions: "_Versions | None" = None) -> None:
        """Keeps the function; the first call of `key` walks."""
        self._function = function
        self._walk: Walk | None = None
        self._versions = _Versions() if versions is None else versions
        self._version = 0
        self._beside: dict[tuple[int, ...], Surroundings] = {}

    def beside(self, objects: Sequence[Any]) -> "Surroundings":
        """Returns the state that the function and these objects among its arguments refer to.

        Keys of all that this returns differ where the states do.
        """
        if not objects:
            return self
        at = tuple(map(id, objects))
        known = self._beside.get(at)  # has the objects, so that no other one has their address
        if known is None:
            if len(self._beside) >= _VERSIONS:
                self._beside.clear()
            known = Surroundings(partial(self._function, *objects), self._versions)
            self._beside[at] = known
        return known

    def key(self) -> Hashable:
        """Returns a key that is equal as long as nothing has changed."""
        walk = self._walk
        if walk is None or not walk.holds():
            walk = self._walk = Walk(self._function)
            self._version = self._versions.of(walk)
            self._warn_of_cost(walk)
        if not walk.tensors:
            return self._version
        return self._version, *map(_METADATA, walk.sized), *map(_OF_NESTED, walk.nested)

    def snapshot(self) -> Walk | None:
        """Returns the state found by the latest `key`."""
        return self._walk

    def changes(self, before: Walk | None) -> Sequence[str]:
        """Names the objects that have changed since a snapshot, and iterators, which may have."""
        if before is None:
            return []
        may_have = map(before.label, before.iterators())
        return [*may_have, *([] if before.holds() else before.changes())]

    @property
    def tensors(self) -> Sequence[Tensor]:
        """The tensors found by the latest `key`."""
        return [] if self._walk is None else self._walk.tensors

    def values(self) -> Mapping[Hashable, tuple[str, Any]]:
        """Returns names and values of the plain values found by the latest `key`, by location."""
        return {} if self._walk is None else self._walk.values()

    def _warn_of_cost(self, walk: Walk) -> None:
        if walk.size > _COSTLY and not self._versions.warned:
            self._versions.warned = True
            warnings.warn(
                f"{name_of(self._function)} refers to {walk.size:,} values, which each call "
                f"compares with those that were checked, in about {walk.size * 50e-6:.0f} ms. "
                "Declare what never changes, such as a vocabulary, by "
                "shardmap_torch.assume_constant(value).",
                stacklevel=2,
            )


class _Versions:
    """Numbers of the states that were found."""

    def __init__(self) -> None:
        self.warned = False
        self._known: dict[Hashable, tuple[int, list[Any]]] = {}
        self._count = 0

    def of(self, walk: Walk) -> int:
        """Returns the number of a state."""
        known = self._known.get(walk.found)
        if known is None:
            if len(self._known) >= _VERSIONS:
                self._known.clear()
            self._count += 1
            # Objects compared by identity are kept alive, or another one could get their address.
            known = self._known[walk.found] = (self._count, walk.opaque)
        return known[0]

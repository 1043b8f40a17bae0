"""References found by a walk, which tell later whether one of them has changed.

A comparison is of identities, in C: some 50 ns for each value that is referred to.
"""

import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from itertools import chain, repeat
from operator import eq, getitem, is_
from types import MappingProxyType
from typing import Any, Final

import torch
from torch import Tensor

from shardmap_torch.checker.guards.changing_objects import Objects, gives_other_values, state_of
from shardmap_torch.checker.guards.places import (
    ABSENT,
    CONTAINERS,
    Kept,
    Place,
    buffer,
    container,
    environment,
    slot,
    state,
    variable,
)

PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
"""Types of values that are compared by value."""
_SEQUENCES: Final = (list, tuple)
_MAPPINGS: Final = (dict, OrderedDict, MappingProxyType)
"""Types that give their items in order, and views that follow them: no subclass of a user."""
_CLASS_NAMES: Final = frozenset({"__class__", "setattr", "__setattr__"})
"""Names by which code may make an object one of another class."""

Table = Mapping[Any, Any]


class References:
    """The references of objects to others, as they were during a walk.

    Attributes:
        tensors: the tensors.
        sized: those that have a shape.
        nested: those that have none.
        opaque: objects that are not entered, which are compared by identity.
    """

    def __init__(self) -> None:
        self.tensors: list[Tensor] = []
        self.sized: list[Tensor] = []
        self.nested: list[Tensor] = []
        self.opaque: list[Any] = []
        self._entries = _Parts()
        self._attributes = _Parts()
        self._looked_up = _Parts()  # those of the entries that `_iterables` do not give
        self._iterables: list[Iterable[Any]] = []
        self._items: list[Any] = []
        self._sizes = _Parts()
        self._empty: list[Collection[Any]] = []
        self._filled: list[Collection[Any]] = []
        self._lengths: list[int] = []
        self._typed: list[Any] = []
        self._types: list[type] = []
        self._sets: list[tuple[Collection[Any], tuple[Any, ...]]] = []
        self._calls: list[tuple[Callable[[], Any], Any]] = []
        self._contents: list[tuple[Any, tuple[str, bytes]]] = []
        self._names: dict[str, None] = {}
        self._missing: dict[tuple[int, str], Table] = {}
        self._variables: dict[int, str] = {}
        self._caches: set[int] = set()
        self._classes: dict[int, type] = {}
        self._read_variables: list[ContextVar[Any]] = []

    def _add_size(self, owner: Collection[Any]) -> None:
        self._sizes.add(owner, None, len(owner))
        if type(owner) in (*_SEQUENCES, *_MAPPINGS) and not owner:
            self._empty.append(owner)
        else:
            self._filled.append(owner)
            self._lengths.append(len(owner))

    def _add_entry(self, owner: Any, name: Any, value: Any) -> None:
        self._entries.add(owner, name, value)
        self._looked_up.add(owner, name, value)

    def _add_entries(self, owner: Any, names: Sequence[Any], values: Sequence[Any]) -> None:
        """Records all entries of a container; iterating over its items is faster than look-ups."""
        self._add_size(owner)
        add = self._add_entry
        if not isinstance(owner, list | tuple):
            self._compare(owner, names)
        if type(owner) in (*_SEQUENCES, *_MAPPINGS):
            self._compare(owner if type(owner) in _SEQUENCES else owner.values(), values)
            add = self._entries.add
        for name, value in zip(names, values, strict=True):
            add(owner, name, value)

    def _compare(self, items: Iterable[Any], values: Sequence[Any]) -> None:
        if values:
            self._iterables.append(items)
            self._items += values

    @property
    def size(self) -> int:
        """Number of values that `holds` compares; 250 bytes of an array cost as much as one."""
        content = sum(len(was) for _, (_, was) in self._contents)
        return len(self._entries.owners) + len(self._attributes.owners) + content // 250

    def holds(self) -> bool:
        """Returns whether nothing has changed since the walk."""
        entries, attributes = self._looked_up, self._attributes
        try:
            return (
                all(
                    map(
                        is_,
                        map(getattr, attributes.owners, attributes.names, repeat(ABSENT)),
                        attributes.values,
                    )
                )
                and not (self._empty and any(self._empty))
                and (not self._filled or all(map(eq, map(len, self._filled), self._lengths)))
                and (
                    not self._items
                    or all(map(is_, chain.from_iterable(self._iterables), self._items))
                )
                and (
                    not entries.owners
                    or all(map(is_, map(getitem, entries.owners, entries.names), entries.values))
                )
                and (not self._typed or all(map(is_, map(type, self._typed), self._types)))
                and (not self._sets or all(all(map(is_, items, was)) for items, was in self._sets))
                and (not self._calls or all(_is_still(call(), was) for call, was in self._calls))
                and (not self._contents or not self._changed_contents())
                and not (self._missing and any([n in t for (_, n), t in self._missing.items()]))
            )
        except (LookupError, RuntimeError):  # as of a dict that another thread changes
            return False

    def changes(self) -> Sequence[str]:
        """Names the objects that have changed since the walk."""
        found = [
            self.label(owner)
            for owner, size in zip(self._sizes.owners, self._sizes.values, strict=True)
            if len(owner) != size
        ]
        for parts, get in ((self._entries, _entry), (self._attributes, _attribute)):
            for owner, name, value in zip(parts.owners, parts.names, parts.values, strict=True):
                if get(owner, name) is not value:
                    found.append(self.label(owner, name))
        typed = zip(self._typed, self._types, strict=True)
        found += [self.label(value) for value, was in typed if type(value) is not was]
        found += [self.label(items) for items, was in self._sets if not _same_items(items, was)]
        found += map(self.label, self._changed_contents())
        found += [repr(name) for (_, name), table in self._missing.items() if name in table]
        return list(dict.fromkeys(found)) or ["what it refers to"]

    def _changed_contents(self) -> list[Any]:
        return [value for value, was in self._contents if state_of(value) != was]

    def places(self) -> Iterator[Place]:
        """Yields what could be changed and put back beside `slots`, and is read to be kept.

        Not a cache of functools, nor iterators.
        """
        for owner in self._sizes.owners:
            if isinstance(owner, CONTAINERS) and id(owner) not in self._caches:
                yield container(owner)
        yield from (container(items) for items, _ in self._sets if isinstance(items, Objects))
        # Their slots are their own, and the walk has what they inherit too.
        classes = zip(self._attributes.owners, self._attributes.names, strict=True)
        yield from (slot(owner, name, True) for owner, name in classes if isinstance(owner, type))
        if not self._names.keys().isdisjoint(_CLASS_NAMES):
            yield from (slot(owner, "__class__", True) for owner in self._typed)
        yield from map(variable, self._read_variables)
        yield from (buffer(value) for value, (_, content) in self._contents if content)

    def slots(self) -> Iterator[Kept]:
        """Yields attributes and entries with their values at the walk, which `holds` compares."""
        known = set(map(id, self._sizes.owners))
        entries, attributes = self._entries, self._attributes
        for owner, name, value in zip(entries.owners, entries.names, entries.values, strict=True):
            if id(owner) in self._classes:
                yield Kept(slot(self._classes[id(owner)], name, True), value)
            elif isinstance(owner, dict) and id(owner) not in known:  # the globals of some code
                yield Kept(slot(owner, name, False), value)
        columns = attributes.owners, attributes.names, attributes.values
        for owner, name, value in zip(*columns, strict=True):
            if not isinstance(owner, type):
                yield Kept(slot(owner, name, True), value)
        for (_, name), table in self._missing.items():
            if table is not sys.modules:
                yield Kept(slot(table, name, False), ABSENT)

    def states(self) -> Iterator[tuple[str, Place]]:
        """Yields names and places of states that only checks compare."""
        for value in self.opaque:
            place = state(value)
            if place is not None:
                yield self.label(value), place
        if "environ" in self._names or "getenv" in self._names:
            yield "the environment", environment()

    def iterators(self) -> Sequence[Any]:
        """Returns iterators, clocks, locks and others whose states cannot be read."""
        return [value for value in self.opaque if gives_other_values(value)]

    def label(self, owner: Any, name: Any = None) -> str:
        """Returns the name by which the code refers to an object, as in `'counter'`."""
        if name == "cell_contents":
            return repr(self._variables.get(id(owner), "a closed-over variable"))
        if isinstance(name, str):
            return repr(name)
        for parts in (self._attributes, self._entries):
            for holder, by, value in zip(parts.owners, parts.names, parts.values, strict=True):
                if value is owner and isinstance(by, str):
                    return self.label(holder, by)
        return f"a {type(owner).__name__}"

    def values(self) -> Mapping[Hashable, tuple[str, Any]]:
        """Returns names and values of the plain values, by location."""
        return {
            (id(owner), name): (self._variables.get(id(owner), str(name)), value)
            for parts in (self._entries, self._attributes)
            for owner, name, value in zip(parts.owners, parts.names, parts.values, strict=True)
            if issubclass(type(value), PLAIN)
        }


class _Parts:
    """Recorded attributes of objects, in three columns over which C code can iterate."""

    def __init__(self) -> None:
        self.owners: list[Any] = []
        self.names: list[Any] = []
        self.values: list[Any] = []

    def add(self, owner: Any, name: Any, value: Any) -> None:
        self.owners.append(owner)
        self.names.append(name)
        self.values.append(value)


def value_of(variable: "ContextVar[Any]") -> Any:
    """Returns what a context variable has, or its default."""
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def _is_still(value: Any, was: Any) -> bool:
    return value is was or (type(value) is type(was) in (int, str) and bool(value == was))


def _same_items(items: Collection[Any], was: tuple[Any, ...]) -> bool:
    return len(items) == len(was) and all(map(is_, items, was))


def _entry(owner: Any, name: Any) -> Any:
    try:
        return owner[name]
    except LookupError:
        return ABSENT


def _attribute(owner: Any, name: Any) -> Any:
    return getattr(owner, name, ABSENT)

"""Captured state: finds what a function's code refers to, and detects changes of it.

A look-up compares identities, in C: some 50 ns for each value that is referred to. The walk is
repeated only if one has changed. No value is skipped because there are many: too many are an error,
and objects that the user declares constant are not entered.
"""

import dis
import functools
import gc
import sys
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import lru_cache, partial
from itertools import count, repeat
from operator import eq, getitem, is_
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardmap_torch.checker.guards.changing import (
    CHANGING_MODULES,
    DICT_VIEWS,
    content_of,
    gives_other_values,
    is_array,
)
from shardmap_torch.checker.guards.constants import is_constant
from shardmap_torch.checker.guards.places import (
    CONTAINERS,
    Place,
    buffer,
    container,
    environment,
    slot,
    state,
    variable,
)
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.errors import ShardTypeError

_PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
_LIMIT: Final = 1_000_000
"""Maximal number of values of a walk; more is an error."""
_COSTLY: Final = 20_000
"""Number of values that each call compares without a warning; they take about 1 ms."""
_VERSIONS: Final = 16
"""Number of states whose versions are kept."""
_LIBRARIES: Final = frozenset(
    {
        *sys.stdlib_module_names,
        *("torch", "shardmap_torch", "numpy", "optree"),
        # Rewritten assertions in test modules refer to all of pytest.
        *("_pytest", "pytest", "pluggy", "hypothesis"),
    }
)
_ABSENT: Final = object()
_CACHE: Final = functools._lru_cache_wrapper
_HIDDEN: Final = ("fget", "__func__", "func", "__wrapped__")
"""Attributes of built-in objects that refer to the user's function that they call."""
_DYNAMIC: Final = frozenset({"globals", "eval", "exec"})
"""Builtins by which code may read any global of its module."""
_BUSY: Final = frozenset({"asyncio", "concurrent", "logging", "multiprocessing", "threading"})
"""Standard modules whose objects change by themselves, and have no state of a body."""
_STANDARD: Final = sys.stdlib_module_names - _BUSY

Table = Mapping[Any, Any]


class Surroundings:
    """State that the code of a function refers to: closures, defaults, globals, attributes.

    The walk enters the user's own functions and classes, the names that the code uses of the user's
    own modules, containers, modules of torch.nn, context variables, results that functools.cache
    keeps, and the attributes of objects, including tensors.
    Plain values are compared by value, tensors by the properties that a verdict can depend on, all
    others by identity.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        """Keeps the function; the first call of `key` walks."""
        self._function = function
        self._warned = False
        self._walk: Walk | None = None
        self._known: dict[Hashable, tuple[int, list[Any]]] = {}
        self._count = 0
        self._version = 0

    def key(self) -> Hashable:
        """Returns a key that is equal as long as nothing has changed."""
        walk = self._walk
        if walk is None or not walk.holds():
            walk = self._walk = Walk(self._function)
            self._version = self._version_of(walk)
            self._warn_of_cost(walk)
        return self._version, tuple([tensor.requires_grad for tensor in walk.tensors])

    def snapshot(self) -> "Walk | None":
        """Returns the state found by the latest `key`."""
        return self._walk

    def changes(self, before: "Walk | None") -> Sequence[str]:
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

    def _warn_of_cost(self, walk: "Walk") -> None:
        if walk.size > _COSTLY and not self._warned:
            self._warned = True
            warnings.warn(
                f"{_name_of(self._function)} refers to {walk.size:,} values, which each call "
                f"compares with those that were checked, in about {walk.size * 50e-6:.0f} ms. "
                "Declare what never changes, such as a vocabulary, by "
                "shardmap_torch.assume_constant(value).",
                stacklevel=2,
            )

    def _version_of(self, walk: "Walk") -> int:
        known = self._known.get(walk.found)
        if known is None:
            if len(self._known) >= _VERSIONS:
                self._known.clear()
            self._count += 1
            # Objects compared by identity are kept alive, or another one could get their address.
            known = self._known[walk.found] = (self._count, walk.opaque)
        return known[0]


class Walk:
    """All objects that a function refers to, found in one walk.

    Attributes:
        found: identity or value of each, in the order of the walk.
        tensors: the tensors.
        opaque: objects that are not entered, which are compared by identity.
    """

    is_assumed = staticmethod(is_constant)
    """Returns whether an object is not entered since it was declared constant."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.tensors: list[Tensor] = []
        self.opaque: list[Any] = []
        self._entries = _Parts()
        self._attributes = _Parts()
        self._sizes = _Parts()
        self._sets: list[tuple[Collection[Any], tuple[Any, ...]]] = []
        self._calls: list[tuple[Callable[[], Any], Any]] = []
        self._contents: list[tuple[Any, bytes]] = []
        self._modules: list[Table] = []
        self._names: dict[str, None] = {}
        self._read: set[tuple[int, str]] = set()
        self._missing: dict[tuple[int, str], Table] = {}
        self._variables: dict[int, str] = {}
        self._caches: set[int] = set()
        self._classes: dict[int, type] = {}
        self._read_variables: list[ContextVar[Any]] = []
        self._pending: list[Any] = [function]
        self.found = tuple(self._follow(function))

    @property
    def size(self) -> int:
        """Number of values that `holds` compares."""
        return len(self._entries.owners) + len(self._attributes.owners)

    def holds(self) -> bool:
        """Returns whether nothing has changed since the walk."""
        entries, attributes, sizes = self._entries, self._attributes, self._sizes
        try:
            return (
                all(map(eq, map(len, sizes.owners), sizes.values))
                and all(map(is_, map(getitem, entries.owners, entries.names), entries.values))
                and all(
                    map(
                        is_,
                        map(getattr, attributes.owners, attributes.names, repeat(_ABSENT)),
                        attributes.values,
                    )
                )
                and (not self._sets or all(all(map(is_, items, was)) for items, was in self._sets))
                and (not self._calls or all(call() is was for call, was in self._calls))
                and (not self._contents or not self._changed_contents())
                and not any([name in table for (_, name), table in self._missing.items()])
            )
        except LookupError:
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
        found += [self.label(items) for items, was in self._sets if tuple(items) != was]
        found += map(self.label, self._changed_contents())
        found += [repr(name) for (_, name), table in self._missing.items() if name in table]
        return list(dict.fromkeys(found)) or ["what it refers to"]

    def _changed_contents(self) -> list[Any]:
        return [value for value, was in self._contents if content_of(value) != was]

    def places(self) -> Iterator[Place]:
        """Yields what could be changed and put back; not a cache of functools, nor iterators."""
        for owner in self._sizes.owners:
            if isinstance(owner, CONTAINERS) and id(owner) not in self._caches:
                yield container(owner)
        known = set(map(id, self._sizes.owners))
        for owner, name in zip(self._entries.owners, self._entries.names, strict=True):
            if id(owner) in self._classes:
                yield slot(self._classes[id(owner)], name, True)
            elif isinstance(owner, dict) and id(owner) not in known:  # the globals of some code
                yield slot(owner, name, False)
        for owner, name in zip(self._attributes.owners, self._attributes.names, strict=True):
            yield slot(owner, name, True)
        for (_, name), table in self._missing.items():
            if table is not sys.modules:
                yield slot(table, name, False)
        yield from map(variable, self._read_variables)
        yield from (buffer(value) for value, was in self._contents if was)

    def states(self) -> Iterator[tuple[str, Place]]:
        """Yields names and places of states that only checks compare."""
        for value in self.opaque:
            place = state(value)
            if place is not None:
                yield self.label(value), place
        yield from ((self.label(value), buffer(value)) for value, was in self._contents if not was)
        if "environ" in self._names or "getenv" in self._names:
            yield "the environment", environment()

    def iterators(self) -> Sequence[Any]:
        """Returns iterators and clocks, whose states cannot be read."""
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
            if isinstance(value, _PLAIN)
        }

    def _follow(self, function: Callable[..., Any]) -> Iterator[Hashable]:
        places: dict[int, int] = {}
        for place in count():
            if not self._pending:
                self._enter_modules()
            if not self._pending:
                return
            if place == _LIMIT:
                raise _too_much(function)
            value = self._pending.pop()
            if isinstance(value, _PLAIN) and is_library(type(value)):
                yield type(value), value
            elif type(value) is Tensor or isinstance(value, nn.Parameter):
                self.tensors.append(value)
                yield value.shape, value.stride(), value.dtype, value.device, self._level(value)
                yield self._enter_table(value.__dict__)
            elif id(value) in places:
                yield places[id(value)]
            else:
                places[id(value)] = place
                yield type(value), self._enter(value)

    def _level(self, value: Tensor) -> Hashable:
        """Returns the identity of a transform's tensor, which belongs to that transform alone."""
        wrapped = functorch.is_functorch_wrapped_tensor(value)
        return self._keep(value) if wrapped else None

    def _enter(self, value: Any) -> Hashable:
        """Enters an object's references; returns its identity apart from these."""
        if self.is_assumed(value):
            return self._keep(value)
        for types, enter in _ENTRIES:
            if isinstance(value, types):
                own = enter in _OPEN and not is_library(type(value))
                return enter(self, value), self._enter_object(value) if own else None
        if is_array(value):
            return self._enter_content(value)
        if not is_library(type(value)):
            return self._enter_object(value)
        holder = _root(type(value)) in _STANDARD and hasattr(value, "__dict__")
        return self._keep(value), self._enter_table(vars(value)) if holder else None

    def _keep(self, value: Any) -> Hashable:
        self.opaque.append(value)
        return id(value)

    def _enter_function(self, function: FunctionType) -> Hashable:
        if is_library(function):
            return self._keep(function)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._enter_attribute(function, name)
        for name, storage_type in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._variables[id(storage_type)] = name
            self._enter_attribute(storage_type, "cell_contents")
        self._enter_table(function.__dict__)
        self._enter_names(function.__globals__, function.__code__)
        return function.__code__

    def _enter_names(self, table: Table, code: CodeType) -> None:
        """Enters the globals of some code, and the attributes that it may read of modules."""
        globals_, attributes, imports, texts = names_of(code)
        self._names |= dict.fromkeys(attributes)
        if not _DYNAMIC.isdisjoint(globals_):
            # The names among its strings, as in globals()["FLAG"]; else it may be any global.
            named = [text for text in texts if text in table]
            globals_ = (*globals_, *(named or [n for n in table if not n.startswith("__")]))
        if "getattr" in globals_:
            attributes = (*attributes, *texts)
        tables = [(table, globals_)]
        tables += [
            (vars(module), tuple(name for name in attributes if name in vars(module)))
            for module in self._imported(imports, table)
        ]
        seen = {id(table)}
        while tables:
            table, names = tables.pop()
            for name in names:
                value = self._enter_name(table, name)
                below = vars(value) if isinstance(value, ModuleType) else {}
                if below and not is_library(value) and id(below) not in seen:
                    seen.add(id(below))
                    tables.append((below, tuple(n for n in attributes if n in below)))

    def _enter_modules(self) -> None:
        """Enters what any code may read of modules that it gets by closures or attributes."""
        for table in self._modules:
            for name in self._names:
                if name in table and (id(table), name) not in self._read:
                    self._read.add((id(table), name))
                    self._enter_name(table, name)

    def _imported(self, names: Iterable[str], table: Table) -> Iterator[ModuleType]:
        """Yields the user's own modules that code imports when it runs, also relatively."""
        for name in names:
            for full in (name, f"{table.get('__package__')}.{name}"):
                if full not in sys.modules:
                    self._missing[id(sys.modules), full] = sys.modules
                elif not is_library(sys.modules[full]):
                    yield sys.modules[full]

    def _enter_name(self, table: Table, name: str) -> Any:
        """Enters a global; a missing one is recorded, since it may later hide a builtin."""
        if name not in table:
            self._missing[id(table), name] = table
            return None
        value = table[name]
        self._entries.add(table, name, value)
        self._pending.append(value)
        return value

    def _enter_attribute(self, owner: Any, name: str) -> None:
        value = getattr(owner, name, _ABSENT)  # a cell may be empty
        self._attributes.add(owner, name, value)
        if not isinstance(value, CodeType):
            self._pending.append(value)

    def _enter_object(self, value: Any) -> Hashable:
        self._pending.append(type(value))
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                self._enter_attribute(value, _mangled(base, name))
        return self._enter_table(getattr(value, "__dict__", {}))

    def _enter_plain(self, value: Any) -> Hashable:
        return value  # type: ignore[no-any-return]  # a number or text of a user's own kind

    def _enter_class(self, value: type) -> Hashable:
        if is_library(value):
            return self._keep(value)
        self._pending += [*value.__bases__, type(value)]
        table = vars(value)
        self._classes[id(table)] = value
        return self._enter_table(table)

    def _enter_method(self, value: MethodType) -> Hashable:
        self._pending += [value.__func__, value.__self__]
        return None

    def _enter_partial(self, value: "partial[Any]") -> Hashable:
        self._pending += [value.func, value.args, value.keywords]
        return None

    def _enter_cache(self, value: Any) -> Hashable:
        """Enters a cached function and its cached results."""
        for part in gc.get_referents(value):
            if type(part) is not dict:
                self._pending.append(part)  # one result, where the cache has a limit
            elif part is not vars(value):
                self._sizes.add(part, None, len(part))
                self._caches.add(id(part))
                self._pending += part.values()
        return self._enter_descriptor(value)

    def _enter_call(self, call: Callable[[], Any]) -> Hashable:
        value = call()
        self._calls.append((call, value))
        self._pending.append(value)
        return None

    def _enter_variable(self, value: "ContextVar[Any]") -> Hashable:
        self._read_variables.append(value)
        return self._keep(value), self._enter_call(lambda: value.get(_ABSENT))

    def _enter_descriptor(self, value: Any) -> Hashable:
        self._pending += [getattr(value, name, None) for name in _HIDDEN]
        return None

    def _enter_sequence(self, value: Sequence[Any]) -> Hashable:
        self._sizes.add(value, None, len(value))
        for place, item in enumerate(value):
            self._entries.add(value, place, item)
        self._pending += value
        return len(value)

    def _enter_view(self, value: Any) -> Hashable:
        self._pending += gc.get_referents(value)  # the dict itself, which may be put back
        return None

    def _enter_builtin(self, value: Any) -> Hashable:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, type | ModuleType):
            return self._keep(value)
        self._pending.append(owner)
        return str(value.__name__)

    def _enter_memory(self, value: memoryview) -> Hashable:
        self._pending.append(value.obj)
        return self._keep(value)

    def _enter_module(self, value: ModuleType) -> Hashable:
        if not is_library(value):
            self._modules.append(vars(value))
        elif _root(value) in CHANGING_MODULES:
            self._modules.append(CHANGING_MODULES[_root(value)])
        return self._keep(value)

    def _enter_content(self, value: Any) -> Hashable:
        self._contents.append((value, content_of(value)))
        return self._keep(value), self._contents[-1][1]

    def _enter_set(self, value: Collection[Any]) -> Hashable:
        self._sizes.add(value, None, len(value))
        self._sets.append((value, tuple(value)))
        self._pending += value
        return len(value)

    def _enter_table(self, table: Table) -> Hashable:
        self._sizes.add(table, None, len(table))
        for name, value in table.items():
            self._entries.add(table, name, value)
        self._pending += table.values()
        return tuple(table)


def _mangled(cls: type, name: str) -> str:
    """Returns the name by which Python keeps a slot that is private to its class."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _entry(owner: Any, name: Any) -> Any:
    try:
        return owner[name]
    except LookupError:
        return _ABSENT


def _attribute(owner: Any, name: Any) -> Any:
    return getattr(owner, name, _ABSENT)


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


_ENTRIES: Final[tuple[tuple[Any, Callable[[Walk, Any], Hashable]], ...]] = (
    (FunctionType, Walk._enter_function),
    (MethodType, Walk._enter_method),
    (partial, Walk._enter_partial),
    (property | staticmethod | classmethod, Walk._enter_descriptor),
    (functools.cached_property, Walk._enter_descriptor),
    (_CACHE, Walk._enter_cache),
    (ContextVar, Walk._enter_variable),
    (weakref.ref, Walk._enter_call),
    (_PLAIN, Walk._enter_plain),
    (tuple | list, Walk._enter_sequence),
    (set | frozenset | deque, Walk._enter_set),
    (dict, Walk._enter_table),
    (type, Walk._enter_class),
    ((*DICT_VIEWS, MappingProxyType), Walk._enter_view),
    ((BuiltinFunctionType, MethodWrapperType), Walk._enter_builtin),
    (memoryview, Walk._enter_memory),
    (nn.Module, Walk._enter_object),
    (Tensor, Walk._keep),
    (ModuleType, Walk._enter_module),
)
"""Functions that enter an object, by its type; the first match counts."""

_OPEN: Final = (
    Walk._enter_plain,
    Walk._enter_sequence,
    Walk._enter_set,
    Walk._enter_table,
)
"""Functions for types that users subclass, whose objects have attributes and methods too."""


@lru_cache(maxsize=4096)
def names_of(code: CodeType) -> tuple[tuple[str, ...], ...]:
    """Finds the globals, all names, imports and strings of code and the functions in it."""
    globals_: dict[str, None] = {}
    names: dict[str, None] = {}
    imports: dict[str, None] = {}
    texts: dict[str, None] = {}
    for each in _codes(code):
        names |= dict.fromkeys(each.co_names)
        texts |= dict.fromkeys(text for text in each.co_consts if isinstance(text, str))
        steps = list(dis.get_instructions(each))
        globals_ |= dict.fromkeys(str(i.argval) for i in steps if i.opname in _LOADS)
        imports |= dict.fromkeys(str(i.argval) for i in steps if i.opname == "IMPORT_NAME")
    return tuple(globals_), tuple(names), tuple(imports), tuple(texts)


_LOADS: Final = frozenset({"LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS"})


def _codes(code: CodeType) -> Iterable[CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes(constant)


def is_library(value: Any) -> bool:
    """Returns whether a library defines an object, or its class."""
    return _root(value) in _LIBRARIES


def is_library_name(module: object) -> bool:
    """Returns whether a module of this name is a library's."""
    return str(module).split(".")[0] in _LIBRARIES


def _root(value: Any) -> str:
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    return str(name or "").split(".")[0]


def _name_of(function: Callable[..., Any]) -> str:
    return getattr(function, "__name__", type(function).__name__)


def _too_much(function: Callable[..., Any]) -> ShardTypeError:
    return ShardTypeError(
        f"{_name_of(function)} refers to more than {_LIMIT:,} values, so that no call could tell "
        "whether its verdict still holds.\nFix: declare what never changes, such as a vocabulary "
        "or a data set, by shardmap_torch.assume_constant(value), or pass what the body needs of "
        "it as an argument."
    )

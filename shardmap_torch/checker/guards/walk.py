"""The walk through what a function's code refers to.

No value is skipped because there are many: too many are an error, and objects that the user
declares constant are not entered.
"""

import abc
import builtins
import functools
import gc
import logging
import operator
import os
import sys
import threading
import weakref
from collections import defaultdict, deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FunctionType,
    MappingProxyType,
    MethodDescriptorType,
    MethodType,
    MethodWrapperType,
    ModuleType,
)
from typing import Any, Final

import torch
from torch import Tensor, nn

from shardmap_torch.checker.guards.changing_objects import (
    CHANGING_MODULES,
    DICT_VIEWS,
    Objects,
    has_objects,
    is_array,
    state_of,
)
from shardmap_torch.checker.guards.code_names import names_in
from shardmap_torch.checker.guards.constants import is_constant
from shardmap_torch.checker.guards.libraries import (
    OWN,
    STANDARD,
    is_installed,
    is_library,
    is_library_name,
    root_of,
    switches_of,
)
from shardmap_torch.checker.guards.places import ABSENT
from shardmap_torch.checker.guards.references import PLAIN, References, Table, value_of
from shardmap_torch.checker.guards.switches import NAMES as SWITCHES
from shardmap_torch.checker.guards.switches import switches
from shardmap_torch.checker.ir.symbolic import SymbolicNumber
from shardmap_torch.core.closures import is_empty
from shardmap_torch.core.source_location import definition_of
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.errors import ShardTypeError

_LIMIT: Final = 1_000_000
"""Maximal number of values of a walk; more is an error."""
_CACHE: Final = functools._lru_cache_wrapper
_HIDDEN: Final = ("fget", "__func__", "func", "__wrapped__")
"""Attributes of built-in objects that refer to the user's function that they call."""
_DYNAMIC: Final = frozenset({"globals", "eval", "exec"})
"""Builtins by which code may read any global of its module, as by the globals of a frame."""
_IMPORTING: Final = frozenset({"import_module", "__import__", "modules"})
"""Names by which code may get a module that its strings name."""
_READING: Final = frozenset({"getattr", "hasattr", "vars", "__dict__", "attrgetter", "getmembers"})
"""Names by which code may read attributes that its strings name, or any."""
_SELF_NAMES: Final = frozenset({"__name__", "__qualname__", "__doc__", "__annotations__"})
"""Attributes of functions and classes that are compared where some code names them."""
_OF_CLASS: Final = ("__doc__", "__annotations__")  # a class has them in its dict, or lacks them
_OPERATORS: Final = (
    *("__add__", "__sub__", "__mul__", "__matmul__", "__truediv__", "__pow__", "__neg__"),
    *("__radd__", "__rsub__", "__rmul__", "__rtruediv__", "__getitem__", "__setitem__"),
    *("__iadd__", "__isub__", "__imul__", "__eq__", "__lt__", "__gt__", "__bool__"),
)
"""Names of functions of tensors that code calls without naming them."""
_SIGNED: Final = (float, complex)  # 0.0 equals -0.0
_CODE: Final = (
    *(FunctionType, BuiltinFunctionType, MethodType, MethodDescriptorType, type, ModuleType),
)


class Walk(References):
    """All objects that a function refers to, found in one walk.

    Attributes:
        found: identity or value of each, in the order of the walk.
    """

    is_assumed = staticmethod(is_constant)
    """Returns whether an object is not entered since it was declared constant."""
    is_installed = staticmethod(is_installed)
    """Returns whether a function or class is that of an installed package, and not entered."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self._modules: list[Table] = []
        self._own: list[Table] = []  # of objects of this package, which have walks in them
        self._named: list[Any] = []
        self._called: set[tuple[type, str]] = set()
        self._library_code: list[Any] = []
        self._reads_any = self._asks = False
        self._read: set[tuple[int, str]] = set()
        self._pending: list[Any] = [function]
        self._places: dict[int, int] = {}
        self._installed: list[Any] = []
        self._packages = {*map(root_of, _parts_of(function))}
        self.found = tuple(self._follow(function))
        self.found += tuple(map(self._keep, self._library_code))

    def _follow(self, function: Callable[..., Any]) -> Iterator[Hashable]:
        places = self._places
        for place in count():
            if not self._pending:
                self._enter_modules()
            if not self._pending:
                yield from self._enter_packages()
            if not self._pending:
                return
            if place == _LIMIT:
                raise _too_much(function)
            value = self._pending.pop()
            if issubclass(type(value), PLAIN) and is_library(type(value)):
                yield type(value), repr(value) if type(value) in _SIGNED else value
            elif type(value) is Tensor or isinstance(value, nn.Parameter):
                yield type(value), places.setdefault(id(value), place)
                self.tensors.append(value)
                (self.nested if value.is_nested else self.sized).append(value)
                if value.is_nested or value.layout != torch.strided:  # such have no strides
                    yield self._keep(value)
                    continue
                yield value.shape, value.stride(), value.dtype, value.device, self._level(value)
                yield value.is_conj(), value.is_neg(), self._enter_table(value.__dict__)
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
        if self.is_assumed(value) or type(value) is SymbolicNumber:  # kept by a body in a check
            return self._keep(value)
        for types, enter in _ENTRIES:
            if isinstance(value, types):
                own = enter in _OPEN and not is_library(type(value))
                return enter(self, value), self._enter_object(value) if own else None
        if is_array(value):
            return self._enter_content(value)
        if isinstance(value, BaseException):
            self._enter_attribute(value, "args")
        if not is_library(type(value)):
            return self._enter_object(value)
        return self._enter_library_object(value)

    def _enter_library_object(self, value: Any) -> Hashable:
        """Enters what Python's own objects have; of others, what any code may read by its name."""
        own = getattr(value, "__dict__", None)
        if root_of(type(value)) not in STANDARD:
            is_own = root_of(type(value)) == OWN
            (self._own if is_own else self._modules).extend([] if own is None else [own])
            return self._keep(value)
        if own is None and not hasattr(value, "__next__"):  # made in C, or with slots
            parts = gc.get_referents(value)
            self._pending += [part for part in parts if not isinstance(part, type | ModuleType)]
        return self._keep(value), None if own is None else self._enter_table(own)

    def _keep(self, value: Any) -> Hashable:
        self.opaque.append(value)
        return id(value)

    def _enter_function(self, function: FunctionType) -> Hashable:
        if is_library(function):
            return self._keep(function)
        is_outside = self._is_outside(function)
        if not is_outside:
            self._named.append(function)
        for name in ("__code__", "__defaults__", "__kwdefaults__"):
            self._enter_attribute(function, name)
        for name, storage_type in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            self._variables[id(storage_type)] = name
            self._enter_cell(storage_type)
        self._enter_table(function.__dict__)
        if not is_outside:
            self._enter_names(function.__globals__, function.__code__)
        return function.__code__

    def _is_outside(self, value: Any) -> bool:
        """Returns whether a function or class counts as a library's, unless a layer is of it."""
        is_outside = self.is_installed(value) and root_of(value) not in self._packages
        self._installed += [value] if is_outside else []
        return is_outside

    def _enter_packages(self) -> Iterator[Hashable]:
        """Enters code of packages that layers are of; of others, what a user may set."""
        own = [value for value in self._installed if root_of(value) in self._packages]
        if own:
            self._installed = [x for x in self._installed if root_of(x) not in self._packages]
            self._pending += own
            for value in own:
                self._places.pop(id(value), None)
            return
        for table, name, value in switches_of(self._installed):
            self._add_entry(table, name, value)
            yield value
        self._installed = []

    def _enter_cell(self, cell: CellType) -> None:
        if is_empty(cell):
            self._enter_call(lambda: is_empty(cell))
        else:
            self._enter_attribute(cell, "cell_contents")

    def _enter_names(self, table: Table, code: CodeType) -> None:
        """Enters the globals of some code, and the attributes that it may read of modules."""
        globals_, attributes, imports, texts = names_in(code)
        self._names |= dict.fromkeys(attributes)
        if not _DYNAMIC.isdisjoint(globals_) or "f_globals" in attributes:
            # The names among its strings, as in globals()["FLAG"]; else it may be any global.
            named = [text for text in texts if text in table]
            new = [text for text in texts if text.isidentifier()]
            known = named or [n for n in table if not n.startswith("__")]
            globals_ = (*globals_, *dict.fromkeys((*known, *new)))
        if not _READING.isdisjoint((*globals_, *attributes)):
            attributes = (*attributes, *texts)
            self._reads_any = self._reads_any or not any(map(str.isidentifier, texts))
            self._names |= dict.fromkeys(texts)
        if not _IMPORTING.isdisjoint(attributes):
            named = [table[name] for name in globals_ if type(table.get(name)) is str]
            imports = (*imports, *texts, *named)
        tables = [(table, globals_)]
        tables += [
            (vars(module), tuple(name for name in attributes if name in vars(module)))
            for module in self._imported(imports, table)
        ]
        seen = set[int]()
        while tables:
            table, names = tables.pop()
            for name in names:
                value = self._enter_name(table, name)
                is_class = isinstance(value, type) and is_library(value)
                below: Table = vars(value) if is_class or isinstance(value, ModuleType) else {}
                if below and id(value) not in seen:
                    seen.add(id(value))
                    tables.append((below, tuple(n for n in attributes if n in below)))

    def _enter_modules(self) -> None:
        """Enters what any code may read of modules that it gets by closures or attributes.

        Also the functions of torch's classes that it may call, which may be replaced.
        """
        for owner in self._named:
            for name in _SELF_NAMES.intersection(self._names):
                if not (isinstance(owner, type) and name in _OF_CLASS):
                    self._enter_attribute(owner, name)
        for name in (*_OPERATORS, *self._names):
            if hasattr(Tensor, name) and (Tensor, name) not in self._called:
                self._enter_function_of(Tensor, name)
        self._named = []
        if not self._asks and not SWITCHES.isdisjoint(self._names):
            self._asks = True
            self._enter_call(lambda: repr(switches()))
        public = [name for name in self._names if not name.startswith("_")]
        named = ("__getattr__", *self._names)
        tables = [(table, table if self._reads_any else named) for table in self._modules]
        for table, names in (*tables, *((table, public) for table in self._own)):
            for name in names:
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
                    self._add_entry(sys.modules, full, sys.modules[full])
                    yield sys.modules[full]

    def _enter_name(self, table: Table, name: str) -> Any:
        """Enters a global; a missing one is recorded, since it may later hide a builtin."""
        if name not in table:
            self._missing[id(table), name] = table
            table = vars(builtins)
            if name not in table:
                return None
        value = table[name]
        self._add_entry(table, name, value)
        if value is os.getenv:
            self._pending.append(os.environ)
        builtin = isinstance(value, BuiltinFunctionType)
        is_code = builtin or (isinstance(value, _CODE) and is_library(value))
        if is_code and is_library_name(table.get("__name__", table.get("__module__"))):
            self._note_library_code(value)
        elif value is not sys.modules:
            self._pending.append(value)
        return value

    def _enter_attribute(self, owner: Any, name: str) -> None:
        value = getattr(owner, name, ABSENT)  # a cell may be empty
        self._attributes.add(owner, name, value)
        if not isinstance(value, CodeType):
            self._pending.append(value)

    def _enter_object(self, value: Any) -> Hashable:
        self._pending.append(type(value))
        self._typed.append(value)
        self._types.append(type(value))
        for base in type(value).__mro__:
            slots = vars(base).get("__slots__", ())
            for name in [slots] if isinstance(slots, str) else slots:
                self._enter_attribute(value, _mangled(base, name))
        return self._enter_table(getattr(value, "__dict__", {}))

    def _enter_layer(self, value: nn.Module) -> Hashable:
        """Enters a module of torch or of the user, and the hooks of all modules."""
        self._packages |= {*map(root_of, type(value).__mro__)}
        for name in ("forward", "__call__") if is_library(type(value)) else ():
            if (type(value), name) not in self._called:
                self._enter_function_of(type(value), name)
        hooks = vars(nn.modules.module).items()
        self._pending += [each for name, each in hooks if name.startswith("_global_")]
        return self._enter_object(value)

    def _enter_function_of(self, owner: type, name: str) -> None:
        self._called.add((owner, name))
        value = getattr(owner, name)
        if getattr(owner, name) is value:  # not one that is made when it is asked for
            self._attributes.add(owner, name, value)
            self._note_library_code(value)

    def _note_library_code(self, value: Any) -> None:
        """Keeps a function that code takes from a library: another may come to its place."""
        self._library_code.append(value)

    def _enter_plain(self, value: Any) -> Hashable:
        """Returns what a number or text of a user's own kind shows, which may equal others."""
        kind: Any = next(kind for kind in PLAIN if isinstance(value, kind))
        return kind.__repr__(value)  # type: ignore[no-any-return]

    def _enter_class(self, value: type) -> Hashable:
        if is_library(value):
            return self._keep(value)
        if self._is_outside(value):
            self._modules += [vars(each) for each in (*value.__mro__, type(value))]
            return self._keep(value)
        self._named.append(value)
        if isinstance(value, abc.ABCMeta):  # others may be registered as its subclasses
            self._enter_call(abc.get_cache_token)
        self._pending += [*value.__bases__, type(value)]
        self._attributes.add(value, "__bases__", value.__bases__)
        table = vars(value)
        self._classes[id(table)] = value
        return self._enter_table(table)

    def _enter_method(self, value: MethodType) -> Hashable:
        self._pending += [value.__func__, value.__self__]
        return None

    def _enter_partial(self, value: "partial[Any]") -> Hashable:
        for name in ("func", "args", "keywords"):
            self._enter_attribute(value, name)
        return self._enter_table(vars(value))

    def _enter_cache(self, value: Any) -> Hashable:
        """Enters a cached function and its cached results."""
        if self._is_outside(value):
            return self._keep(value)
        for part in gc.get_referents(value):
            if type(part) is not dict:
                self._pending.append(part)  # one result, where the cache has a limit
            elif part is not vars(value):
                self._add_size(part)
                self._caches.add(id(part))
                self._pending += part.values()
        return self._enter_descriptor(value), self._enter_table(vars(value))

    def _enter_call(self, call: Callable[[], Any]) -> Hashable:
        value = call()
        self._calls.append((call, value))
        self._pending.append(value)
        return None

    def _enter_variable(self, value: "ContextVar[Any]") -> Hashable:
        self._read_variables.append(value)
        return self._keep(value), self._enter_call(lambda: value_of(value))

    def _enter_descriptor(self, value: Any) -> Hashable:
        self._pending += [getattr(value, name, None) for name in _HIDDEN]
        return None

    def _enter_sequence(self, value: Sequence[Any]) -> Hashable:
        self._add_entries(value, range(len(value)), tuple(value))
        self._pending += value
        return len(value)

    def _enter_view(self, value: Any) -> Hashable:
        self._pending += gc.get_referents(value)  # the dict itself, which may be put back
        return None

    def _enter_builtin(self, value: Any) -> Hashable:
        owner = getattr(value, "__self__", None)
        if owner is None or isinstance(owner, ModuleType):
            return self._keep(value)
        self._pending.append(owner)  # a class too, as of `Function.apply` in torch 2.14
        return str(value.__name__)

    def _enter_memory(self, value: memoryview) -> Hashable:
        self._pending.append(value.obj)
        return self._keep(value)

    def _enter_module(self, value: ModuleType) -> Hashable:
        if not is_library(value):
            self._modules.append(vars(value))
        elif root_of(value) in CHANGING_MODULES:
            self._modules.append(CHANGING_MODULES[root_of(value)])
        return self._keep(value)

    def _enter_content(self, value: Any) -> Hashable:
        if has_objects(value):
            return self._keep(value), self._enter_set(Objects(value))
        state, more = state_of(value), getattr(value, "__dict__", {})
        self._contents.append((value, state))
        return self._keep(value), state, self._enter_table(more)

    def _enter_set(self, value: Collection[Any]) -> Hashable:
        self._add_size(value)
        self._sets.append((value, tuple(value)))
        self._pending += value
        return len(value), getattr(value, "maxlen", None)

    def _enter_default(self, value: "defaultdict[Any, Any]") -> Hashable:
        self._enter_attribute(value, "default_factory")
        return self._enter_table(value)

    def _enter_getter(self, value: "operator.attrgetter[Any]") -> Hashable:
        names = value.__reduce__()[1]
        self._names |= dict.fromkeys(part for name in names for part in name.split("."))
        return names

    def _enter_logger(self, value: logging.Logger) -> Hashable:
        for owner, name in ((value, "level"), (value, "disabled"), (value.manager, "disable")):
            self._enter_attribute(owner, name)
        self._enter_attribute(value, "parent")
        return self._keep(value)

    def _enter_event(self, value: threading.Event) -> Hashable:
        self._enter_attribute(value, "_flag")
        return self._keep(value)

    def _enter_table(self, table: Table) -> Hashable:
        names, values = tuple(table), tuple(table.values())
        self._add_entries(table, names, values)
        self._pending += values
        words = tuple([name if type(name) is str else None for name in names])
        self._pending += [name for name, word in zip(names, words, strict=True) if word is None]
        return words


def _mangled(cls: type, name: str) -> str:
    """Returns the name by which Python keeps a slot that is private to its class."""
    is_private = name.startswith("__") and not name.endswith("__")
    return f"_{cls.__name__.lstrip('_')}{name}" if is_private else name


def _parts_of(function: Callable[..., Any]) -> Iterator[Any]:
    """Yields a function, and what it is made of."""
    yield function if hasattr(function, "__module__") else type(function)
    if isinstance(function, partial):
        for part in (function.func, *function.args, *function.keywords.values()):
            yield from _parts_of(part)
    elif isinstance(function, MethodType):
        yield from type(function.__self__).__mro__


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable."""
    return getattr(function, "__name__", type(function).__name__)


def _too_much(function: Callable[..., Any]) -> ShardTypeError:
    site = definition_of(function)
    where = "" if site is None else f"  at {site}\n"
    return ShardTypeError(
        f"{name_of(function)} refers to more than {_LIMIT:,} values, so that no call could tell "
        f"whether its verdict still holds.\n{where}Fix: declare what never changes, such as a "
        "vocabulary or a data set, by shardmap_torch.assume_constant(value), or pass what the body "
        "needs of it as an argument."
    )


_ENTRIES: Final[tuple[tuple[Any, Callable[[Walk, Any], Hashable]], ...]] = (
    (FunctionType, Walk._enter_function),
    (MethodType, Walk._enter_method),
    (partial, Walk._enter_partial),
    (property | staticmethod | classmethod, Walk._enter_descriptor),
    (functools.cached_property, Walk._enter_descriptor),
    (_CACHE, Walk._enter_cache),
    (ContextVar, Walk._enter_variable),
    (weakref.ref, Walk._enter_call),
    (PLAIN, Walk._enter_plain),
    (tuple | list, Walk._enter_sequence),
    (set | frozenset | deque, Walk._enter_set),
    (defaultdict, Walk._enter_default),
    (dict, Walk._enter_table),
    (type, Walk._enter_class),
    ((*DICT_VIEWS, MappingProxyType), Walk._enter_view),
    ((BuiltinFunctionType, MethodWrapperType), Walk._enter_builtin),
    (memoryview, Walk._enter_memory),
    (nn.Module, Walk._enter_layer),
    (Tensor, Walk._enter_object),
    (ModuleType, Walk._enter_module),
    (operator.attrgetter, Walk._enter_getter),
    (logging.Logger, Walk._enter_logger),
    (threading.Event, Walk._enter_event),
)
"""Functions that enter an object, by its type; the first match counts."""

ENTERED: Final = tuple(types for types, _ in _ENTRIES)
"""Types of objects that refer to others; nested, as `isinstance` takes them."""

_OPEN: Final = (
    Walk._enter_plain,
    Walk._enter_sequence,
    Walk._enter_set,
    Walk._enter_table,
)
"""Functions for types that users subclass, whose objects have attributes and methods too."""

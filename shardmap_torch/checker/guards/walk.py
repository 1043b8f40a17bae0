"""The walk through what a function's code refers to.

No value is skipped because there are many: too many are an error, and objects that the user
declares constant are not entered.
"""

import functools
import gc
import sys
import weakref
from collections import deque
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from functools import partial
from itertools import count
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
    Objects,
    content_of,
    has_objects,
    is_array,
)
from shardmap_torch.checker.guards.code_names import names_of
from shardmap_torch.checker.guards.constants import is_constant
from shardmap_torch.checker.guards.libraries import STANDARD, is_library, root_of
from shardmap_torch.checker.guards.references import ABSENT, PLAIN, References, Table
from shardmap_torch.core.torch_private.engine import functorch
from shardmap_torch.errors import ShardTypeError

_LIMIT: Final = 1_000_000
"""Maximal number of values of a walk; more is an error."""
_CACHE: Final = functools._lru_cache_wrapper
_HIDDEN: Final = ("fget", "__func__", "func", "__wrapped__")
"""Attributes of built-in objects that refer to the user's function that they call."""
_DYNAMIC: Final = frozenset({"globals", "eval", "exec"})
"""Builtins by which code may read any global of its module."""
_IMPORTING: Final = frozenset({"import_module", "__import__"})
"""Functions by which code may import a module that its strings name."""


class Walk(References):
    """All objects that a function refers to, found in one walk.

    Attributes:
        found: identity or value of each, in the order of the walk.
    """

    is_assumed = staticmethod(is_constant)
    """Returns whether an object is not entered since it was declared constant."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Walks from a function on."""
        super().__init__()
        self._modules: list[Table] = []
        self._read: set[tuple[int, str]] = set()
        self._pending: list[Any] = [function]
        self.found = tuple(self._follow(function))

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
            if isinstance(value, PLAIN) and is_library(type(value)):
                yield type(value), value
            elif type(value) is Tensor or isinstance(value, nn.Parameter):
                self.tensors.append(value)
                if value.is_nested or value.layout != torch.strided:  # such have no strides
                    yield self._keep(value)
                    continue
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
        if isinstance(value, BaseException):
            self._enter_attribute(value, "args")
        if not is_library(type(value)):
            return self._enter_object(value)
        holder = root_of(type(value)) in STANDARD and hasattr(value, "__dict__")
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
            new = [text for text in texts if text.isidentifier()]
            known = named or [n for n in table if not n.startswith("__")]
            globals_ = (*globals_, *dict.fromkeys((*known, *new)))
        if "getattr" in globals_:
            attributes = (*attributes, *texts)
        if not _IMPORTING.isdisjoint(attributes):
            imports = (*imports, *texts)
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

    def _enter_plain(self, value: Any) -> Hashable:
        return value  # type: ignore[no-any-return]  # a number or text of a user's own kind

    def _enter_class(self, value: type) -> Hashable:
        if is_library(value):
            return self._keep(value)
        self._pending += [*value.__bases__, type(value)]
        self._attributes.add(value, "__bases__", value.__bases__)
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
        return self._keep(value), self._enter_call(lambda: value.get(ABSENT))

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


def name_of(function: Callable[..., Any]) -> str:
    """Returns the name of a function, or of the class of another callable."""
    return getattr(function, "__name__", type(function).__name__)


def _too_much(function: Callable[..., Any]) -> ShardTypeError:
    return ShardTypeError(
        f"{name_of(function)} refers to more than {_LIMIT:,} values, so that no call could tell "
        "whether its verdict still holds.\nFix: declare what never changes, such as a vocabulary "
        "or a data set, by shardmap_torch.assume_constant(value), or pass what the body needs of "
        "it as an argument."
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

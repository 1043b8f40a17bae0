"""State: the plain data that code and objects refer to, and whether it has changed.

A verdict depends on the code, defaults, closures and globals that a body names, and on plain data
reached from them and from static arguments: numbers, strings, None, dtypes, devices, enums, builtin
containers, dataclasses, the `vars` of instances, and what is known of tensors without their values.
None of the objects' own methods is called. Code of installed packages is not followed, nor what
only it refers to. Anything else that a body reads has to stay as it is, as under `jax.jit`.

A look-up compares versions of dicts and identities of objects in C, some 0.3 us for a layer of
torch; a walk is made again only where one of them differs.
"""

import argparse
import dis
import site
import sys
import sysconfig
from collections import ChainMap, OrderedDict, UserDict, UserList, defaultdict, deque
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from functools import _lru_cache_wrapper, cached_property, lru_cache, partial
from itertools import chain
from numbers import Number
from operator import attrgetter, call, is_
from pathlib import Path
from types import (
    BuiltinMethodType,
    CellType,
    CodeType,
    FunctionType,
    MethodType,
    ModuleType,
    SimpleNamespace,
)
from typing import Any, Final, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from shardmap_torch.boundary.call import Call
from shardmap_torch.checker.guards.holders import (
    ABSENT,
    Holder,
    builtin_of,
    dict_of,
    held,
    is_same,
    slots_of,
)
from shardmap_torch.checker.rules.registry import table_version
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.source_location import definition_of
from shardmap_torch.core.torch_private.engine import (
    DisableTorchFunction,
    dict_version,
    forward_level,
    functorch,
    no_torch_function,
    num_function_modes,
    tensor_guard,
)
from shardmap_torch.errors import ShardTypeError

X = TypeVar("X")

CONSTANTS: dict[int, Any] = {}
"""Objects that are declared constant, by their ids."""


def assume_constant(value: X) -> X:
    """Declares that an object, and all that it refers to, never changes.

    Before each call of a checked function the data that its code refers to is compared with that of
    the check, and a check undoes what it changes of it. A data set can be left out, or a log that a
    body writes and never reads. The promise is not verified: a change of a constant leaves an old
    verdict in force.

    Args:
        value: any object; it is kept alive.

    Returns:
        The object itself.

    Source: `torch.compiler.assume_constant_result`.

    Example:
        >>> from shardmap_torch import assume_constant
        >>> vocabulary = assume_constant({f"token {i}": i for i in range(50_000)})
    """
    CONSTANTS[id(value)] = value
    return value


PLAIN: Final = (int, float, bool, str, bytes, complex, type(None), torch.dtype, torch.device)
"""Types of values that are compared by value."""
_LIMIT: Final = 1_000_000
"""Maximal number of values of a walk; more is an error."""
_SIGNED: Final = (float, complex)  # 0.0 equals -0.0, and nan does not equal nan
_TABLES: Final = (dict, OrderedDict, defaultdict)
_ROWS: Final = (list, set, deque)
"""Types of containers that can change and are read by Python's own methods; no subclass of them."""
_CODE: Final = ("__code__", "__defaults__", "__kwdefaults__")
_SILENT: Final = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "_abc_impl"})
"""Attributes of a class that are no data of it."""
_PARTS: Final[Mapping[type, tuple[str, ...]]] = {
    MethodType: ("__func__", "__self__"),
    BuiltinMethodType: ("__self__",),
    partial: ("func", "args", "keywords"),
    property: ("fget",),
    staticmethod: ("__func__",),
    classmethod: ("__func__",),
    cached_property: ("func",),
    _lru_cache_wrapper: ("__wrapped__",),
}
"""Attributes of Python's own wrappers that have what they wrap."""
_OF_SAVING: Final = frozenset(
    {
        *("_state_dict_hooks", "_state_dict_pre_hooks", "_non_persistent_buffers_set"),
        *("_load_state_dict_pre_hooks", "_load_state_dict_post_hooks"),
    }
)
"""Attributes of modules for saving, which no forward asks for; skipped to save time."""
_BASES: Final = vars(type)["__bases__"].__get__
_METADATA: Final = attrgetter("requires_grad", "dtype", "shape")


def _versions_follow() -> bool:
    """Returns whether versions of dicts follow attributes: not in Python 3.13.0 (gh-125608)."""
    probe = type("Probe", (), {})()
    probe.x = 1
    before = dict_version(vars(probe))
    probe.x = 2
    return bool(dict_version(vars(probe)) != before)


VERSIONS_FOLLOW = _versions_follow()
"""Tells whether `dict_version` follows all changes of a dict; else its entries are compared."""


class State:
    """The plain data that a function, and objects, refer to at the time of a walk.

    Attributes:
        found: what each object is that was met, by value if it is plain; equal for equal states.
        names: the name by which each was met.
        tensors: those that were met.
        holders: what can change, in the same order for equal states.
        opaque: the objects that are compared by identity, kept: no other one gets their address.
        number: of this state among those of a function.
    """

    def __init__(self, function: Callable[..., Any] | None, objects: Sequence[Any] = ()) -> None:
        """Walks from a function and from other objects.

        Raises:
            ShardTypeError: they refer to more than a million values.
        """
        self.names: list[str] = []
        self.tensors: list[Tensor] = []
        self.holders: list[Holder] = []
        self.opaque: list[Any] = []
        self.number = 0
        self._origins = Origins(function)
        self._readers: list[Callable[[], Any]] = []
        self._values: list[Any] = []
        self._tables: list[dict[Any, Any]] = []
        self._rows: list[Any] = []
        self._items: list[Any] = []
        self._empty: list[Any] = []
        self._objects: list[Any] = []
        self._kinds: list[type] = []
        self._watched: list[Tensor] = []
        self._modules: dict[int, dict[str, Any]] = {}
        self._named: dict[str, None] = {}
        self._entered = set[tuple[int, str]]()
        self._pending = [("", each) for each in (*objects, function)]
        self._roots = (function, *objects)
        self._entries: dict[type, Callable[[State, Any], Hashable]] = {}
        self.found = tuple(self._walk())
        self._versions = [*map(dict_version, self._tables)]
        self._lengths = [*map(len, self._rows)]
        self._metadata = self._read_metadata()
        self._guard = tensor_guard(self._watched) if self._watched else None

    def holds(self) -> bool:
        """Returns whether nothing has changed since the walk."""
        try:
            return (
                all(map(is_, map(call, self._readers), self._values))
                and all(map(is_, map(type, self._objects), self._kinds))
                and not any(self._empty)
                and [*map(dict_version, self._tables)] == self._versions
                and (not self._rows or self._rows_hold())
                and (not self._watched or self._tensors_hold())
            )
        except (AttributeError, ValueError, RuntimeError):  # gone, or changed by another thread
            return False

    def _rows_hold(self) -> bool:
        return [*map(len, self._rows)] == self._lengths and all(
            map(is_, chain.from_iterable(self._rows), self._items)
        )

    def _tensors_hold(self) -> bool:
        """Compares what may change of tensors in place.

        Dynamo's guard does so in 90 ns a tensor. It fails under other modes too, as autocast.
        """
        if self._guard is not None and self._guard.check(*self._watched):
            return True
        return self._read_metadata() == self._metadata

    def _read_metadata(self) -> list[Any]:
        with DisableTorchFunction():  # a function mode would see each question
            return [*map(type, self._watched), *map(_METADATA, self._watched)]

    def mentions(self, name: str) -> bool:
        """Returns whether code has a name, of an attribute for instance."""
        return name in self._named

    def values(self) -> Mapping[int, tuple[str, Any]]:
        """Returns names and values of the plain values, by their places in the walk."""
        pairs = enumerate(zip(self.names, self.found, strict=True))
        return {
            place: (name, entry[0](entry[1]) if entry[0] in _SIGNED else entry[1])
            for place, (name, entry) in pairs
            if isinstance(entry, tuple) and entry[0] in PLAIN
        }

    def _walk(self) -> Iterator[Hashable]:
        places: dict[int, int] = {}
        while self._pending or self._enter_modules():
            name, value = self._pending.pop()
            kind, place = type(value), len(self.names)
            self.names.append(name)
            if kind in PLAIN:
                yield kind, repr(value) if kind in _SIGNED else value
            elif id(value) in places:
                yield places[id(value)]
            else:
                places[id(value)] = place
                yield kind, self._enter(value, kind)
            if place >= _LIMIT:
                raise _too_much(next(each for each in self._roots if each is not None))

    def _enter(self, value: Any, kind: type) -> Hashable:
        """Enters what an object refers to; returns what it is apart from that."""
        if value is ABSENT or id(value) in CONSTANTS:
            return self._keep(value)
        enter = self._entries.get(kind)
        if enter is None:
            enter = self._entries[kind] = _entry_of(kind)
        return enter(self, value)

    def _watch(self, value: Any, read: Callable[..., Any], *place: Any) -> None:
        """Has `holds` read a place again; the same object has to be there."""
        self._readers.append(partial(read, *place))
        self._values.append(value)

    def _watch_class(self, value: Any) -> None:
        self._objects.append(value)
        self._kinds.append(type(value))

    def _keep(self, value: Any) -> int:
        self.opaque.append(value)
        return id(value)

    def _meet(self, name: str, value: Any) -> None:
        self._pending.append((name, value))

    def _enter_function(self, function: FunctionType) -> Hashable:
        code = function.__code__
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            self._enter_cell(name, cell)
        self._enter_table(function.__dict__)
        if self._origins.is_library(code.co_filename):
            return self._keep(code)  # its cells were entered: a decorator has the user's function
        for name in _CODE:
            self._watch(getattr(function, name), getattr, function, name)
        self._meet("defaults", function.__defaults__)
        self._meet("defaults", function.__kwdefaults__)
        names = names_in(code)
        self._named |= dict.fromkeys(names.others)
        for name in names.globals:
            self._enter_name(function.__globals__, name)
        for module in imported_by(function):
            self._enter_module(module)
        return self._keep(code)

    def _enter_cell(self, name: str, cell: CellType) -> None:
        value = held(cell, None)
        self._meet(name, value)
        if value is not ABSENT:
            self.holders.append((cell, name))
            self._watch(value, getattr, cell, "cell_contents")

    def _enter_name(self, space: dict[str, Any], name: str) -> None:
        """Enters a global; one that is missing may come later, and hide a builtin."""
        if (id(space), name) not in self._entered:
            self._entered.add((id(space), name))
            value = space.get(name, ABSENT)
            self._watch(value, dict.get, space, name, ABSENT)
            self.holders.append((space, name))
            self._meet(name, value)

    def _enter_module(self, module: ModuleType) -> Hashable:
        if not self._origins.is_of_library(module.__name__):
            self._modules[id(module)] = vars(module)
        return self._keep(module)

    def _enter_modules(self) -> bool:
        """Enters what any code names of the user's modules; returns whether that was something."""
        for space in self._modules.values():
            for name in ("__getattr__", *self._named):
                if name in space:
                    self._enter_name(space, name)
        return bool(self._pending)

    def _enter_class(self, value: type) -> Hashable:
        table = vars(value)
        if self._origins.is_of_library(module_of(value)):
            return self._keep(value)
        self._rows.append(table.values())  # a view, which follows changes
        self._items += table.values()
        self._watch(value.__bases__, _BASES, value)
        self._watch_class(value)
        own = [name for name in table if name not in _SILENT]
        for name in own:
            self.holders.append((value, name))
            self._meet(name, table[name])
        for each in (*value.__bases__, type(value)):
            self._meet("class", each)
        return tuple(own)

    def _enter_parts(self, value: Any) -> Hashable:
        names = next(names for kind, names in _PARTS.items() if issubclass(type(value), kind))
        for name in names:
            self._meet(name, object.__getattribute__(value, name))
        table = dict_of(value)
        if table is not None:
            self._enter_table(table)
        return value.__name__ if type(value) is BuiltinMethodType else None

    def _enter_number(self, value: Any) -> Hashable:
        """Enters a number or text of a user's own kind, which may equal others."""
        kind: Any = next(each for each in PLAIN if issubclass(type(value), each))
        return kind.__repr__(value), self._enter_attributes(value)

    def _enter_dict(self, value: dict[Any, Any]) -> Hashable:
        if type(value) is defaultdict:
            self._meet("default", value.default_factory)
        own = None if type(value) in _TABLES else self._enter_attributes(value)
        return own, self._enter_table(value)

    def _enter_table(self, table: dict[Any, Any]) -> Hashable:
        """Enters the entries of a dict, which may be the attributes of an object."""
        self.holders.append((table, None))
        is_empty = type(table) in _TABLES and not table  # others may say anything
        if is_empty or VERSIONS_FOLLOW:
            (self._empty if is_empty else self._tables).append(table)
        else:
            self._rows += (dict.keys(table), dict.values(table))  # views, which follow changes
            self._items += (*dict.keys(table), *dict.values(table))
        is_ordered = issubclass(type(table), OrderedDict)
        items: Any = (OrderedDict if is_ordered else dict).items
        if is_ordered:  # the version does not follow its order
            keys: Any = OrderedDict.keys
            self._rows.append(keys(table))
            self._items += keys(table)
        names: list[str | None] = []
        for name, value in items(table):
            if type(name) is str:
                names.append(name)
                if name not in _OF_SAVING:
                    self._pending.append((name, value))
            else:
                names.append(None)
                self._pending += [(str(name) if type(name) is int else "", value), ("", name)]
        return tuple(names)

    def _enter_items(self, value: Any) -> Hashable:
        kind = builtin_of(type(value))
        own = None if type(value) is kind else self._enter_attributes(value)
        items = [*kind.__iter__(value)]
        if kind not in (tuple, frozenset):
            self._compare(value, items)
        self._pending += zip(map(str, range(len(items))), items, strict=True)
        return own, len(items), value.maxlen if kind is deque else None

    def _compare(self, value: Any, items: list[Any]) -> None:
        self.holders.append((value, None))
        if type(value) not in _ROWS:
            self._watch(True, _has_still, value, held(value, None))
        elif items:
            self._rows.append(value)
            self._items += items
        else:
            self._empty.append(value)

    def _enter_attributes(self, value: Any) -> Hashable:
        """Enters what an object has in its dict and its slots; returns None for one without."""
        kind = type(value)
        self._watch_class(value)
        if self._origins.is_closed(kind):
            return None
        slots, table = slots_of(kind), dict_of(value)
        for slot in slots:
            item = held(value, slot)
            self.holders.append((value, slot))
            self._watch(item, held, value, slot)
            self._meet(slot.__name__, item)
        if table is None and not slots:
            return None
        self._meet("class", kind)
        return len(slots), None if table is None else self._enter_table(table)

    def _enter_instance(self, value: Any) -> Hashable:
        return self._enter_attributes(value) or self._keep(value)

    def _enter_tensor(self, value: Tensor) -> Hashable:
        self.tensors.append(value)
        kind = type(value)
        is_plain = kind in (Tensor, nn.Parameter)
        if value.is_nested:  # it has no shape
            return self._keep(value), value.requires_grad, value.dtype
        if functorch.is_functorch_wrapped_tensor(value) or value.layout != torch.strided:
            return self._keep(value)
        if not is_plain and self._origins.is_closed(kind):
            return self._keep(value)  # such have more to them, as a DTensor its placements
        if is_plain or kind.__torch_function__ is no_torch_function:
            self._watched.append(value)
        own = dict_of(value)
        attributes = self._enter_table(own) if is_plain and own is not None else None
        with DisableTorchFunction():
            known = value.shape, value.stride(), value.dtype, value.device, value.requires_grad
            bits = value.is_conj(), value.is_neg()
        return known, bits, attributes if is_plain else self._enter_attributes(value)


def _has_still(value: Any, items: Any) -> bool:
    return is_same(held(value, None), items)


def _entry_of(kind: type) -> Callable[[State, Any], Hashable]:
    # By the class itself: isinstance asks an object of a user's class for its class.
    return next(
        (enter for types, enter in _ENTRIES if issubclass(kind, types)), State._enter_instance
    )


_ENTRIES: Final[tuple[tuple[Any, Callable[[State, Any], Hashable]], ...]] = (
    (FunctionType, State._enter_function),
    (tuple(_PARTS), State._enter_parts),
    (PLAIN, State._enter_number),
    (dict, State._enter_dict),
    ((list, tuple, set, frozenset, deque), State._enter_items),
    (type, State._enter_class),
    (ModuleType, State._enter_module),
    (Tensor, State._enter_tensor),
)
"""Methods that enter an object, by its type; the first match counts."""


def name_of(function: Any) -> str:
    """Returns the name of a function, or of the class of another object."""
    return function.__name__ if type(function) is FunctionType else type(function).__name__


def _too_much(function: Any) -> ShardTypeError:
    site = definition_of(function)
    where = "" if site is None else f"  at {site}\n"
    return ShardTypeError(
        f"{name_of(function)} refers to more than {_LIMIT:,} values, so that no call could tell "
        f"whether its verdict still holds.\n{where}Fix: declare what never changes, such as a "
        "vocabulary or a data set, by shardmap_torch.assume_constant(value), or pass what the body "
        "needs of it as an argument."
    )


# ---------------------------------------------------------- names in code, and whose code it is


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
_LOADS: Final = frozenset(("LOAD_GLOBAL", "LOAD_NAME", "LOAD_FROM_DICT_OR_GLOBALS", "STORE_GLOBAL"))


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
    for each in codes_in(code):
        loads = [str(i.argval) for i in dis.get_instructions(each) if i.opname in _LOADS]
        globals_ |= dict.fromkeys(loads)
        others |= dict.fromkeys(each.co_names)
        constants = [text for text in each.co_consts if isinstance(text, str)]
        texts |= dict.fromkeys(text for text in constants if text.isidentifier())
    read = {**globals_, **texts} if _BY_TEXT & others.keys() else globals_
    return Names((*read,), (*others, *texts))


def codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yields code, and that of the functions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from codes_in(constant)


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


# --------------------------------------------------------------------------- keys of verdicts


_DEVICES: Final = ("cpu", "cuda")
_KEPT: Final = 64
"""Number of states, and of sets of arguments, that are remembered."""

Signature: TypeAlias = tuple[Any, ...]


class CapturedState:
    """State of a function and of the objects among the arguments of its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        """Keeps the function; the first question walks."""
        self._function = function
        self._own: State | None = None
        self._of_objects: Memo[State] = Memo(_KEPT)
        self._numbers: Memo[tuple[int, Sequence[Any]]] = Memo(_KEPT)
        self._count = 0

    def key(self, call: Call) -> Hashable:
        """Returns a key that is equal for equal states of what a call refers to."""
        own = self._own
        if own is None or not own.holds():
            own = self._own = State(self._function)
            own.number = self._number_of(own)
        if not call.match.static:
            return own.number
        objects = _objects(call)
        ids = tuple(map(id, objects))
        state = self._of_objects.find(ids)
        if state is None or not state.holds():
            state = State(None, objects)
            state.number = self._number_of(state)
            self._of_objects.put(ids, state)
        return own.number, state.number

    def states(self, call: Call) -> list[State]:
        """Returns the states of the latest key: of the function, and of the arguments' objects."""
        # A state has its objects, so that no other ones get their ids.
        of_objects = self._of_objects.find(tuple(map(id, _objects(call))))
        return [state for state in (self._own, of_objects) if state is not None]

    def tensors(self, call: Call) -> list[Tensor]:
        """Returns the tensors that both refer to."""
        return [x for state in self.states(call) for x in state.tensors]

    def _number_of(self, state: State) -> int:
        """Returns a number of this state, and of all equal ones."""
        self._count += 1
        number, _ = self._numbers.get(state.found, lambda: (self._count, state.opaque))
        return number


def signature(call: Call, captured: CapturedState) -> Signature:
    """Computes the cache key: all visible state that a verdict on `call` depends on.

    Shapes, dtypes, specs and mesh are in the match, one object for all calls that have the same;
    the values of leaves that are no tensors are added.
    """
    leaves, static = call.leaves, call.match.static
    return (
        call.match,
        tuple([_value(leaves[position]) for position in static]) if static else (),
        torch.is_grad_enabled(),
        forward_level() >= 0,
        torch.get_default_dtype(),
        torch.get_default_device() if num_function_modes() else None,
        table_version(),
        _autocast() if True in map(torch.is_autocast_enabled, _DEVICES) else (),
        captured.key(call),
    )


def _objects(call: Call) -> list[Any]:
    """Returns the static arguments that may change in place."""
    static = [call.leaves[position] for position in call.match.static]
    return [x for x in static if type(x) not in PLAIN and not isinstance(x, Number)]


def _value(leaf: Any) -> Any:
    """Tells zero from minus zero, which are equal, in numbers of any library; nan equals nan."""
    if type(leaf).__hash__ is None:  # its state tells it from others
        return type(leaf)
    if type(leaf) is int or not isinstance(leaf, Number):
        return leaf
    return repr(leaf), leaf if leaf == leaf else None


def _autocast() -> tuple[tuple[str, torch.dtype], ...]:
    return tuple(
        [(d, torch.get_autocast_dtype(d)) for d in _DEVICES if torch.is_autocast_enabled(d)]
    )

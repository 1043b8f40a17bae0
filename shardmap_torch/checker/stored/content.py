"""Content of code and of what it refers to, as a hash that is the same in every process.

Captured state, which `guards` compares by identity, is described by its content here: the bytecode
of functions, classes, numbers, shapes. Objects of libraries count by their names, since versions
are a part of the key. What can be described in neither way has no hash: nothing is guessed.

A set counts by its words, not by the order in which a process iterates over them.
"""

import collections
import functools
import gc
import hashlib
import sys
from collections import OrderedDict, deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from contextvars import ContextVar
from enum import Enum
from types import (
    BuiltinFunctionType,
    CodeType,
    FunctionType,
    GenericAlias,
    ModuleType,
    NotImplementedType,
    SimpleNamespace,
)
from typing import Any, Final, Generic, Protocol

import optree
import torch

from shardmap_torch.checker.guards.changing_objects import is_array
from shardmap_torch.checker.guards.code_names import names_in
from shardmap_torch.checker.guards.libraries import is_library, is_library_name
from shardmap_torch.checker.guards.walk import Walk
from shardmap_torch.checker.stored.library import (
    PROCESS_NAMES,
    is_own_state,
    require_steady,
    resolved,
)
from shardmap_torch.core.caching import Memo
from shardmap_torch.core.torch_private.engine import OpOverload, OpOverloadPacket
from shardmap_torch.core.tree import Structure
from shardmap_torch.errors import ShardMapError
from shardmap_torch.mesh import Mesh
from shardmap_torch.spec import P
from shardmap_torch.types import AxisType


class UnstableError(ShardMapError):
    """Something has no content that is the same in every process; the text says what."""


def digest(roots: Iterable[object], rest: Iterable[str]) -> str:
    """Hashes all that some functions and values refer to, and texts.

    Raises:
        UnstableError: some of it has no content that is the same in every process.
    """
    walk = _ContentWalk(tuple(roots))  # type: ignore[arg-type]  # a walk may start anywhere
    lines = [*rest, text(walk.found), *walk.tensor_texts(), *walk.rank_text()]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


class _ContentWalk(Walk):
    """A walk that describes by content or by name what others compare by identity."""

    is_assumed = staticmethod(lambda value: False)
    is_installed = staticmethod(lambda value: False)  # of most packages no version is in the key

    def _enter(self, value: Any) -> Hashable:
        for types, enter in _ENTRIES:
            if isinstance(value, types):
                return enter(self, value)
        if isinstance(value, FunctionType) and is_library_name(value.__globals__.get("__name__")):
            return self._enter_library_function(value)
        if not (isinstance(value, FunctionType) or is_library(type(value))):
            require_transparent(type(value))
        return super()._enter(value)

    def _keep(self, value: Any) -> Hashable:
        if isinstance(value, type):
            return named(value)
        if isinstance(value, FunctionType):
            return self._enter_library_function(value)
        if is_array(value):
            return value.__class__.__name__, _array_text(value)
        if isinstance(value, ContextVar | ModuleType):
            return value.__class__.__name__, getattr(value, "name", getattr(value, "__name__", ""))
        if type(value).__name__ in _DESCRIPTORS and hasattr(value, "__objclass__"):
            return named(value.__objclass__), value.__name__
        if isinstance(value, GenericAlias) or type(value).__module__ in ("typing", "types"):
            return _annotation(value)
        if type(value) is _ABC:
            return "abc"
        if type(value) is _FIELD:
            return text(value.__reduce__())  # its class and its place
        require_transparent(type(value))
        return self._enter_object(value)

    def _enter_library_function(self, function: FunctionType) -> Hashable:
        """Names it, or enters one that a library has made, as a decorator, of known globals."""
        module = str(function.__globals__.get("__name__"))
        require(module, function.__qualname__)
        if resolved(module, function.__qualname__) is function:
            return module, function.__qualname__
        self._pending += [function.__defaults__, function.__kwdefaults__, vars(function)]
        for cell in function.__closure__ or ():
            self._enter_attribute(cell, "cell_contents")
        return function.__code__

    def _enter_builtin(self, value: Any) -> Hashable:
        owner = value.__self__
        if owner is None or isinstance(owner, ModuleType):
            require(value.__module__ or "", value.__name__)
        else:
            self._pending.append(owner)
        kind = text(owner) if isinstance(owner, type) else ""
        return value.__module__, kind, value.__qualname__

    def _enter_sorted(self, value: "set[Any] | frozenset[Any]") -> Hashable:
        return text(frozenset(value))

    def _enter_results(self, value: Any) -> Hashable:
        """Enters the arguments and results of a cached function."""
        for part in gc.get_referents(value):
            if type(part) is not dict:
                self._pending.append(part)  # one of these, where the cache has a limit
            elif part is not vars(value):
                results = (each for each in part.values() if type(each).__name__ != _LINK)
                self._pending += [*part.keys(), *results]
        state = value.cache_info().currsize, self._enter_descriptor(value)
        return state, self._enter_table(vars(value))

    def _enter_named_module(self, value: ModuleType) -> Hashable:
        if is_library(value):
            require(value.__name__, "")
            # Others may have put functions into it, such as another attention, and flags.
            self._modules.append(
                {name: each for name, each in vars(value).items() if _is_foreign(each)}
            )
        return super()._enter_module(value)

    def _enter_own_class(self, value: type) -> Hashable:
        if is_library(value):
            return self._keep(value)
        self._named.append(value)
        self._pending += [*value.__bases__, type(value)]
        # The text that dataclasses write has sets in the order of this process.
        return self._enter_table({k: x for k, x in vars(value).items() if k != "__doc__"})

    def _note_library_code(self, value: Any) -> None:
        """Leaves out code of libraries: versions are hashed, and `patches` finds replacements."""

    def _enter_operator(self, value: OpOverload | OpOverloadPacket) -> Hashable:
        name = str(value)
        if not name.startswith(("aten.", "prims.")):
            raise UnstableError(f"the operator {name}")
        return name

    def _enter_tensor(self, value: torch.Tensor) -> Hashable:
        raise UnstableError(f"a {type(value).__name__}")  # plain ones are described by the walk

    def _enter_repr(self, value: object) -> Hashable:
        return f"{value!r}"

    def _enter_names(self, table: Mapping[Any, Any], code: CodeType) -> None:
        names = names_in(code).names
        # A hash decides nothing where it is asked for by dicts and sets, which compare.
        usual = {"hash"} if code.co_name == "__hash__" else set()
        asked = PROCESS_NAMES.intersection(names) - usual
        if asked:
            raise UnstableError(f"{min(asked)}, by which {code.co_qualname} may ask its process")
        super()._enter_names(table, code)

    def _imported(self, names: Iterable[str], table: Mapping[Any, Any]) -> Iterator[ModuleType]:
        for name in names:
            full = [each for each in (name, f"{table.get('__package__')}.{name}")]
            known = [sys.modules[each] for each in full if each in sys.modules]
            if not known:
                raise UnstableError(f"the module {name}, which is not imported yet")
            for module in known:
                if is_library(module):
                    require(module.__name__, "")
        return super()._imported(names, table)

    def _enter_modules(self) -> None:
        if "getattr" in self._names:  # of a name that code may make as it runs
            for table in self._modules:
                self._names |= dict.fromkeys(name for name in table if name[:2] != "__")
        super()._enter_modules()

    def tensor_texts(self) -> Iterator[str]:
        """Yields what walks compare of tensors in another place, and which share memory."""
        tensors: dict[int, int] = {}
        storages: dict[int, int] = {}
        for at, x in enumerate(self.tensors):
            same = tensors.setdefault(id(x), at)
            shared = storages.setdefault(x.untyped_storage()._cdata, at)
            flags = (x.requires_grad, x.is_leaf, x.is_conj(), x.is_neg(), x.is_inference())
            yield text((same, shared, x.storage_offset(), str(x.layout), *flags))

    def rank_text(self) -> Iterator[str]:
        """Yields the rank of this process, if code may ask for it."""
        if "rank" in self._names and torch.distributed.is_initialized():
            yield f"rank {torch.distributed.get_rank()}"


def _is_foreign(value: object) -> bool:
    """Returns whether a value in a module of a library is not known by the library's version."""
    is_code = isinstance(value, FunctionType | type)
    return type(value) in _TEXTS or (is_code and not is_library(value))


def require(module: str, name: str) -> None:
    """Requires that a function or class of a library has no state of a process.

    Raises:
        UnstableError: it may have.
    """
    try:
        require_steady(module, name)
    except LookupError as error:
        raise UnstableError(f"{error.args[0]}") from None


def named(value: type) -> str:
    """Returns the full name of a class; that of a user is entered, too."""
    if is_library(value):
        require(value.__module__, value.__qualname__)
    return f"{value.__module__}.{value.__qualname__}"


def require_transparent(cls: type) -> None:
    """Requires that all state of a class's objects is in their attributes.

    Raises:
        UnstableError: some may be in C.
    """
    if is_own_state(cls):
        raise UnstableError(f"a {cls.__name__}")
    for base in cls.__mro__:
        if base in _BARE:
            continue
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        added = base.__basicsize__ - (base.__base__ or object).__basicsize__
        slots = vars(base).get("__slots__", ())
        names = [slots] if isinstance(slots, str) else [*slots]
        hidden = any(name.startswith("__") and not name.endswith("__") for name in names)
        # A dict, weak references and slots are pointers; anything more is C's.
        if hidden or not str(file).endswith(".py") or added > 8 * (len(names) + 2):
            raise UnstableError(f"a {cls.__name__}")


_BARE: Final = frozenset(
    {object, int, float, str, bytes, complex, tuple, list, dict, set, frozenset, type, deque}
    | {OrderedDict, BaseException, Exception, Generic, Protocol, Enum}
)
_ABC: Final = type(vars(Iterable)["_abc_impl"])
"""Type of what an abstract class keeps, which no body reads."""

_FIELD: Final = type(vars(collections.namedtuple("_FIELD", "place"))["place"])
"""Type of the fields of named tuples."""

_LINK: Final = "_lru_list_elem"
"""Name of the type of links between results of a cache that has a limit."""

_DESCRIPTORS: Final = frozenset(
    f"{kind}_descriptor" for kind in ("getset", "member", "method", "wrapper", "classmethod")
)


def _annotation(value: object) -> str:
    """Describes a type of an annotation."""
    words = f"{type(value).__name__} {value!r}"
    if " at 0x" in words:
        raise UnstableError(f"a {type(value).__name__}")
    return words


def _array_text(value: Any) -> str:
    if getattr(getattr(value, "dtype", None), "hasobject", False):
        raise UnstableError("an array of objects")
    content = bytes(value) if isinstance(value, bytearray) else value.tobytes()
    shape = (getattr(value, "shape", ()), getattr(value, "dtype", getattr(value, "typecode", "")))
    return f"{shape!r} {hashlib.sha256(content).hexdigest()}"


def text(value: object) -> str:
    """Describes a value that is no reference: equal texts in all processes are equal values.

    Raises:
        UnstableError: a value of another type.
    """
    write = _TEXTS.get(type(value))
    if write is not None:
        return write(value)
    if isinstance(value, type):
        return named(value)
    if isinstance(value, Enum):
        return f"{named(type(value))}.{value.name}"
    for base in (int, float, complex, str, bytes, tuple):
        if isinstance(value, base):
            return f"{named(type(value))}:{_TEXTS[base](value)}"
    raise UnstableError(f"a {type(value).__name__}")


def _tuple_text(value: Iterable[object]) -> str:
    return f"({','.join(map(text, value))})"


def _code_text(code: CodeType) -> str:
    parts = [
        *(code.co_name, code.co_qualname, code.co_filename, code.co_firstlineno),
        *(code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_flags),
        *(code.co_code, code.co_linetable, code.co_exceptiontable),
        *(code.co_consts, code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars),
    ]
    return f"code{_tuple_text(parts)}"


_TEXTS: Final[dict[type, Callable[[Any], str]]] = {
    type(None): repr,
    type(...): repr,
    bool: repr,
    int: int.__repr__,
    str: str.__repr__,
    bytes: bytes.__repr__,
    float: float.hex,
    complex: lambda value: f"{value.real.hex()}+{value.imag.hex()}j",
    torch.dtype: str,
    torch.device: repr,
    torch.Size: lambda value: f"size{_tuple_text(value)}",
    tuple: _tuple_text,
    list: lambda value: f"[{_tuple_text(value)}]",
    frozenset: lambda value: f"{{{','.join(sorted(map(text, value)))}}}",
    CodeType: _code_text,
    P: repr,
    AxisType: repr,
}

_NODES: Final = frozenset({tuple, list, dict, type(None)})


def structure_text(structure: Structure) -> str:
    """Describes a structure of tuples, lists and dicts; others may have code of their own.

    Raises:
        UnstableError: it has others.
    """
    pending: list[Any] = [structure]
    while pending:
        node = pending.pop()
        if node.type is not None and node.type not in _NODES:
            raise UnstableError(f"a tree with a {node.type.__name__}")
        pending += node.children()
    words = f"{structure}"
    if " at 0x" in words:
        raise UnstableError("a key of a dict")
    return words


_ENTRIES: Final[tuple[tuple[Any, Callable[[_ContentWalk, Any], Hashable]], ...]] = (
    (P | AxisType | Mesh | torch.memory_format | torch.layout, _ContentWalk._enter_repr),
    (NotImplementedType, _ContentWalk._enter_repr),
    (ModuleType, _ContentWalk._enter_named_module),
    (type, _ContentWalk._enter_own_class),
    (torch.Tensor, _ContentWalk._enter_tensor),
    (BuiltinFunctionType, _ContentWalk._enter_builtin),
    (functools._lru_cache_wrapper, _ContentWalk._enter_results),
    (set | frozenset, _ContentWalk._enter_sorted),
    (optree.PyTreeSpec, lambda walk, value: structure_text(value)),
    (Memo, lambda walk, value: "memo"),  # what this package remembers, of the same arguments
    (SimpleNamespace, lambda walk, value: walk._enter_table(vars(value))),
    (OpOverload | OpOverloadPacket, _ContentWalk._enter_operator),
)

"""Errors of public functions whose arguments are not what they promise.

A call that works is not looked at. Where one fails in torch or in this package, its arguments are
compared with the annotations, and the error names those that are wrong. What the user's own code
raises, such as a loss that is passed, goes through unchanged, and so does what wrong arguments do
not explain: that is a mistake of this package.
"""

import inspect
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import is_dataclass
from functools import wraps
from itertools import islice
from os import PathLike
from types import FrameType, UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import (
    is_raised_by_call,
    is_raised_by_user,
    users_part,
)
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardMapError, show, show_shape

_REFUSALS: Final = (
    *(IndexError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError),
    ZeroDivisionError,
)
"""Errors by which torch refuses operands; those derived from these mean something else."""

_PACKAGE: Final = __name__.partition(".")[0]

_SIGNS: Final = (
    *("Dimension out of range", "must be", "invalid combination of arguments"),
    *("too big to convert", "Overflow when unpacking"),
)
"""Parts of messages by which errors of torch's functions are distinguished from Python's."""


def export(namespace: dict[str, Any], names: Sequence[str], error: type[ShardMapError]) -> None:
    """Has the functions of a package raise `error` where wrong arguments make them fail.

    The methods of classes do too, those of classes derived from them in this package included.
    """
    for name in set(names) & namespace.keys():  # others are loaded when they are asked for
        value = namespace[name]
        if inspect.isclass(value) and not issubclass(value, BaseException):
            _export_methods(value, error, name)
        elif _is_own(value) and value.__module__.startswith(namespace["__name__"]):
            namespace[name] = _explaining(value, error, name)


def _is_own(value: object) -> bool:
    """Returns whether it is a function of this package that does not explain its errors yet."""
    if not inspect.isfunction(value) or value.__code__.co_filename == __file__:
        return False
    return value.__module__.startswith(_PACKAGE)


def _export_methods(owner: type[Any], error: type[ShardMapError], name: str) -> None:
    make = vars(owner).get("__init__")
    if is_dataclass(owner) and _is_own(make):
        owner.__init__ = _constructor(make, error, name)  # type: ignore[method-assign]
    for method in dir(owner):
        value = inspect.getattr_static(owner, method)
        if not method.startswith("_") and _is_own(value):
            if len(inspect.signature(value).parameters) > 1:  # else there is nothing to explain
                setattr(owner, method, _explaining(value, error, f"{name}.{method}"))
    for derived in owner.__subclasses__():
        _export_methods(derived, error, name)


_GIVEN: Final = ("Hardware", "Mesh", "Row", "ShapeDtype")
"""The data classes that users make too: all others are results, which only this package makes."""


def _constructor(make: Any, error: type[ShardMapError], name: str) -> Callable[..., None]:
    """Compares what users construct with annotations; refuses to construct a result for them."""
    explaining = _explaining(make, error, name)

    @wraps(make)
    def construct(self: Any, /, *args: Any, **kwargs: Any) -> None:
        if torch.compiler.is_compiling():  # a program of this package: Dynamo has no frames
            return make(self, *args, **kwargs)  # type: ignore[no-any-return]
        frame: FrameType | None = sys._getframe(1)
        while frame and frame.f_globals.get("__name__") == "dataclasses":  # its `replace`
            frame = frame.f_back
        if frame and frame.f_globals.get("__name__", "").startswith(_PACKAGE):
            return make(self, *args, **kwargs)  # type: ignore[no-any-return]
        if name not in _GIVEN:
            raise error(f"{name} is what functions of {_PACKAGE} return; it is not made by hand.")
        explaining(self, *args, **kwargs)
        given = inspect.signature(make).bind(self, *args, **kwargs).arguments
        if text := _wrong(make, given, None):
            raise error(f"{name}: {text}")

    return construct


def call_given(
    function: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    error: type[ShardMapError],
    what: str,
) -> Any:
    """Calls what a user has given as a function, and raises `error` if it takes no such call."""
    try:
        return function(*args, **kwargs)
    except TypeError as raised:
        if not is_raised_by_call(raised):
            raise
        name = getattr(function, "__name__", show(function))
        raise error(f"{what} of {name}: it cannot be called so: {raised}.") from raised


def _explaining(
    function: Callable[..., Any], error: type[ShardMapError], name: str
) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as raised:
            # A method may be called by a function of ours, whose arguments are to blame.
            caller = sys._getframe(1).f_globals if "." in name else {}
            is_inner = caller.get("__name__", "").startswith(_PACKAGE)
            text = None if is_inner else _explanation(function, name, args, kwargs, raised)
            if text is None:
                raised.__traceback__ = users_part(raised)  # frames of this package say nothing
                raise
            raise error(f"{name}: {text}") from raised

    return call


def _explanation(
    function: Callable[..., Any],
    name: str,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    raised: Exception,
) -> str | None:
    """Says what is wrong with the arguments; None where they are not to blame."""
    if isinstance(raised, ShardMapError) or is_raised_by_user(raised):
        return None
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as unbound:
        return f"{unbound}; it is {name}{_without_types(signature)}."
    given.pop("self", None)
    if wrong := _wrong(function, given, raised):
        return wrong
    if type(raised) not in _REFUSALS or not _is_of_torch(raised):
        return None
    why = (str(raised).splitlines() or [repr(raised)])[0]
    met = ", ".join(f"{word}={_shown(value)}" for word, value in given.items())
    return f"torch refuses {met}: {why}"


def _wrong(function: Any, given: Mapping[str, Any], raised: Exception | None) -> str:
    """Says what is wrong with each argument of a call, whether or not it has failed."""
    hints = get_type_hints(function)
    wrong = [
        f"{word}={_shown(value)} {problem}."
        for word, value in given.items()
        for problem in _problems(value, hints.get(word, Any), raised)
    ]
    return " ".join(dict.fromkeys(wrong))


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _is_of_torch(raised: Exception) -> bool:
    """Returns whether an operation of torch raised it, and no statement of this package."""
    if isinstance(raised, RuntimeError | ZeroDivisionError):
        return True
    return any(sign in str(raised) for sign in _SIGNS)


def _problems(value: object, hint: Any, raised: Exception | None) -> Iterator[str]:
    """Yields what is wrong with an argument."""
    if not _fits(value, hint):
        yield f"is no {_text(hint)}"
        return
    if isinstance(raised, KeyError):
        yield from _unknown(value, raised.args[0])
    if isinstance(value, str | PathLike):
        if isinstance(raised, OSError) and str(raised.filename).startswith(str(value)):
            yield f"cannot be used: {raised.strerror}"
        elif type(raised) is ValueError and "\0" in str(value):
            yield f"cannot be used: {raised}"
    try:
        leaves = flatten(value)[0]
    except Exception:  # whatever a container of the user's raises
        yield "is no tree of tensors"
        return
    for leaf in leaves:
        yield from _oddities(leaf, raised)


def _unknown(value: object, key: object) -> Iterator[str]:
    """Yields how an argument explains that a mapping lacks a key."""
    named = [value, *islice(value, 1000)] if isinstance(value, Sequence) else [value]
    if any(type(each) is type(key) and each == key for each in named):
        yield f"names {show(key)}, which is unknown"
    elif isinstance(value, Mapping) and key not in value:
        yield f"lacks {show(key)}"


def _oddities(leaf: object, raised: Exception | None) -> Iterator[str]:
    """Yields what is wrong with a leaf of an argument."""
    if not isinstance(leaf, Tensor):
        name = getattr(leaf, "__qualname__", None)
        if isinstance(raised, TypeError) and name and str(raised).startswith(f"{name}()"):
            yield f"cannot be called as it is here: {raised}"
        if isinstance(raised, AttributeError) and raised.obj is leaf:
            yield f"has no .{raised.name}"
        called = re.findall(r"(\w+)\(\)", str(raised)) if isinstance(leaf, type) else []
        if any(hasattr(leaf, name) for name in called):
            yield "is a class, and no value of it"
        return
    base = base_of(leaf)
    if base.is_nested or base.is_quantized:
        yield f"is a {'nested' if base.is_nested else 'quantized'} tensor, not a dense one"
    elif base.layout != torch.strided:
        yield f"is a {str(base.layout).removeprefix('torch.').lstrip('_')} tensor, not a dense one"
    elif base.is_meta:
        yield "is on the meta device, and has no values"


_ITEMS: Final = (tuple, list, str, bytes, bytearray, range)
"""Sequences whose items are compared with an annotation, as a dict's, the first 1000."""


def _fits(value: object, hint: Any) -> bool:
    """Returns whether a value may have this annotation; True where that is unknown."""
    origin, parts = get_origin(hint), get_args(hint)
    if hint is Any or isinstance(hint, TypeVar):
        return True
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in parts)
    if origin in (Union, UnionType):
        return any(_fits(value, part) for part in parts)
    wanted = origin or (type(None) if hint is None else hint)
    wanted = (float, int) if wanted is float else wanted
    try:
        is_one = issubclass(type(value), wanted)  # an instance may lie about its class
    except TypeError:  # a protocol
        return True
    if is_one and len(parts) == 2 and isinstance(value, dict):
        items = islice(value.items(), 1000)
        return all(_fits(key, parts[0]) and _fits(each, parts[1]) for key, each in items)
    if is_one and parts and isinstance(value, _ITEMS) and (origin is not tuple or ... in parts):
        return all(_fits(each, parts[0]) for each in islice(value, 1000))
    return is_one


def _text(hint: Any) -> str:
    """Formats an annotation without the names of modules."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    for module in ("collections.abc.", "typing.", "torch."):
        text = text.replace(module, "")
    return text


def _shown(value: Any) -> str:
    """Formats an argument: tensors by dtype and shape."""
    if issubclass(type(value), Tensor):  # an instance may lie about its class
        return show_shape(value.dtype, [] if value.is_nested else value.shape)
    return show(value)

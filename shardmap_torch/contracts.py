"""Errors of public functions whose arguments are not what they promise.

A call that works is not looked at. Where one fails in torch or in this package, its arguments are
compared with the annotations, and the error names those that are wrong. What the user's own code
raises, such as a loss that is passed, goes through unchanged, and so does what wrong arguments do
not explain: that is a mistake of this package.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from errno import ENAMETOOLONG
from functools import wraps
from os import PathLike
from types import UnionType
from typing import Any, Final, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from shardmap_torch.core.functorch import base_of
from shardmap_torch.core.source_location import is_raised_by_call, is_raised_by_user
from shardmap_torch.core.tree import flatten
from shardmap_torch.errors import ShardMapError, show, show_shape

_REFUSALS: Final = (
    *(IndexError, NotImplementedError, OverflowError, RuntimeError, TypeError, ValueError),
    ZeroDivisionError,
)
"""Errors by which torch refuses operands; those derived from these mean something else."""

_SIGNS: Final = (
    *("Dimension out of range", "must be", "invalid combination of arguments"),
    *("too big to convert", "Overflow when unpacking"),
)
"""Parts of messages by which errors of torch's functions are distinguished from Python's."""


def export(namespace: dict[str, Any], names: Sequence[str], error: type[ShardMapError]) -> None:
    """Has the functions of a package raise `error` where wrong arguments make them fail."""
    for name in set(names) & namespace.keys():  # others are loaded when they are asked for
        value = namespace[name]
        if inspect.isfunction(value) and value.__code__.co_filename != __file__:  # else it has been
            if value.__module__.startswith(namespace["__name__"]):
                namespace[name] = _explaining(value, error)


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


def _explaining(function: Callable[..., Any], error: type[ShardMapError]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as raised:
            text = _explanation(function, args, kwargs, raised)
            if text is None:
                raise
            raise error(f"{function.__name__}: {text}") from raised

    return call


def _explanation(
    function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], raised: Exception
) -> str | None:
    """Says what is wrong with the arguments; None where they are not to blame."""
    if isinstance(raised, ShardMapError) or is_raised_by_user(raised):
        return None
    signature = inspect.signature(function)
    try:
        given = signature.bind(*args, **kwargs).arguments
    except TypeError as unbound:
        return f"{unbound}; it is {function.__name__}{_without_types(signature)}."
    hints = get_type_hints(function)
    wrong = [
        f"{name}={_shown(value)} {problem}."
        for name, value in given.items()
        for problem in _problems(value, hints.get(name, Any), raised)
    ]
    if wrong:
        return " ".join(dict.fromkeys(wrong))
    if type(raised) not in _REFUSALS or not _is_of_torch(raised):
        return None
    why = (str(raised).splitlines() or [repr(raised)])[0]
    met = ", ".join(f"{name}={_shown(value)}" for name, value in given.items())
    return f"torch refuses {met}: {why}"


def _without_types(signature: inspect.Signature) -> inspect.Signature:
    parameters = [each.replace(annotation=each.empty) for each in signature.parameters.values()]
    return signature.replace(parameters=parameters, return_annotation=signature.empty)


def _is_of_torch(raised: Exception) -> bool:
    """Returns whether an operation of torch raised it, and no statement of this package."""
    if isinstance(raised, RuntimeError | ZeroDivisionError):
        return True
    return any(sign in str(raised) for sign in _SIGNS)


def _problems(value: object, hint: Any, raised: Exception) -> Iterator[str]:
    """Yields what is wrong with an argument."""
    if not _fits(value, hint):
        yield f"is no {_text(hint)}"
        return
    name = getattr(value, "__qualname__", None)
    if isinstance(raised, TypeError) and name and str(raised).startswith(f"{name}()"):
        yield f"cannot be called as it is here: {raised}"
    if isinstance(raised, OSError) and raised.errno == ENAMETOOLONG:
        if isinstance(value, str | PathLike) and str(raised.filename).startswith(str(value)):
            yield "is too long for a file name"
    try:
        leaves = flatten(value)[0]
    except Exception:  # whatever a container of the user's raises
        yield "is no tree of tensors"
        return
    for leaf in leaves:
        if isinstance(leaf, Tensor):
            yield from _oddities(leaf)
        elif isinstance(raised, AttributeError) and raised.obj is leaf:
            yield f"has no .{raised.name}"


def _oddities(tensor: Tensor) -> Iterator[str]:
    base = base_of(tensor)
    if base.is_nested or base.is_quantized:
        yield f"is a {'nested' if base.is_nested else 'quantized'} tensor, not a dense one"
    elif base.layout != torch.strided:
        yield f"is a {str(base.layout).removeprefix('torch.').lstrip('_')} tensor, not a dense one"
    elif base.is_meta:
        yield "is on the meta device, and has no values"


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
        is_one = isinstance(value, wanted)
    except TypeError:  # a protocol
        return True
    if is_one and isinstance(value, tuple | list | str) and parts and parts[-1] is not Ellipsis:
        return origin is tuple or all(_fits(each, parts[0]) for each in value)
    return is_one


def _text(hint: Any) -> str:
    """Formats an annotation without the names of modules."""
    text = hint.__name__ if isinstance(hint, type) and not get_args(hint) else str(hint)
    for module in ("collections.abc.", "typing.", "torch."):
        text = text.replace(module, "")
    return text


def _shown(value: object) -> str:
    """Formats an argument: tensors by dtype and shape."""
    if isinstance(value, Tensor):
        return show_shape(value.dtype, [] if value.is_nested else value.shape)
    return show(value)

"""Caches of keys and values, as those of transformers: objects that a forward fills with tensors.

A body gets a copy with its rank's tensors. It returns what the copy then has, with which the object
of the caller is filled.
"""

import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optree
from torch import Tensor

from shardmap_torch.core.tree import NAMESPACE, Tree, flatten, unflatten
from shardmap_torch.ops.body import types_of
from shardmap_torch.spec import P
from shardmap_torch.types import V

_TENSOR: Final = "the next tensor"

_HEADS: Final = 1
"""The dim of heads in a tensor [batch, heads, positions, features]."""


@dataclass(frozen=True)
class Frame:
    """An object without its tensors.

    Attributes:
        kind: its class.
        entries: its attributes by name: frames for objects with tensors, and marks for tensors.
    """

    kind: type
    entries: dict[str, Any]

    def __hash__(self) -> int:
        """Hashes what has a hash."""
        return hash((self.kind, *self.entries))


@dataclass(frozen=True)
class Held:
    """A pytree without tensors: frames of caches, or the number of the cache that stands here."""

    value: Any


_HELD: Final[Any] = Held


def _open_held(held: Any) -> tuple[tuple[()], Any, tuple[()]]:
    return (), held, ()


def _close_held(held: Any, children: Any) -> Any:
    return held


optree.register_pytree_node(_HELD, _open_held, _close_held, namespace=NAMESPACE)


def is_cache(value: Any) -> bool:
    """Returns whether a value is a cache of transformers, which is not imported for the answer."""
    library = sys.modules.get("transformers.cache_utils")
    return library is not None and isinstance(value, library.Cache)


def take_out(tree: Tree, caches: list[Any]) -> Tree:
    """Puts a number in the place of each cache in a tree; appends to the caches those not in it."""
    if "transformers.cache_utils" not in sys.modules:
        return tree

    def replace(leaf: Any) -> Any:
        if not is_cache(leaf):
            return leaf
        if all(leaf is not known for known in caches):
            caches.append(leaf)
        return Held(next(i for i, known in enumerate(caches) if known is leaf))

    leaves, structure = flatten(tree)
    return unflatten(structure, map(replace, leaves))


def put_back(tree: Tree, caches: Sequence[Any]) -> Tree:
    """Undoes `take_out`."""
    if not caches:
        return tree

    def replace(leaf: Any) -> Any:
        return caches[leaf.value] if isinstance(leaf, Held) else leaf

    return optree.tree_map(
        replace, tree, is_leaf=lambda leaf: isinstance(leaf, Held), namespace=NAMESPACE
    )


def opened(caches: Sequence[Any]) -> tuple[Held, dict[str, Tensor]]:
    """Returns the frames of caches, and their tensors by path."""
    tensors: dict[str, Tensor] = {}
    frames = tuple(_frame(cache, str(at), tensors) for at, cache in enumerate(caches))
    return Held(frames), tensors


def _frame(value: Any, path: str, tensors: dict[str, Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors[path] = value
        return _TENSOR
    if type(value) is list:
        return [_frame(each, f"{path}.{at}", tensors) for at, each in enumerate(value)]
    if type(value) is dict:
        return {key: _frame(each, f"{path}.{key}", tensors) for key, each in value.items()}
    if not _is_part(value):
        return value
    return Frame(type(value), _frame(vars(value), path, tensors))


def _is_part(value: Any) -> bool:
    """Returns whether a value is a cache or a layer of one."""
    return hasattr(value, "reorder_cache") and not isinstance(value, type)


def closed(frames: Held, tensors: Sequence[Tensor]) -> list[Any]:
    """Rebuilds caches from their frames and tensors."""
    remaining = iter(tensors)
    return [_close(frame, remaining) for frame in frames.value]


def _close(frame: Any, tensors: Iterator[Tensor]) -> Any:
    if frame is _TENSOR:
        return next(tensors)
    if type(frame) is list:
        return [_close(each, tensors) for each in frame]
    if type(frame) is dict:
        return {key: _close(each, tensors) for key, each in frame.items()}
    if not isinstance(frame, Frame):
        return frame
    cache: Any = object.__new__(frame.kind)
    vars(cache).update(_close(frame.entries, tensors))
    return cache


def own(caches: Iterable[Any]) -> None:
    """Copies the tensors of caches that a forward writes into: of fixed sizes, and in dicts."""
    for cache in caches:
        _own(cache)


def _own(holder: Any) -> None:
    """Copies what is written in an object, a list or a dict; keys that grow are made anew."""
    table = holder if type(holder) in (dict, list) else vars(holder)
    is_written = table is holder or getattr(holder, "is_compileable", False)
    for name, value in enumerate(table) if type(table) is list else [*table.items()]:
        if isinstance(value, Tensor):
            table[name] = value.clone() if is_written else value
        elif type(value) in (dict, list) or _is_part(value):
            _own(value)


def fill(caches: Sequence[Any], results: Sequence[Any]) -> list[Any]:
    """Fills caches in place with the results of the same number; returns these and the others."""
    for cache, result in zip(caches, results, strict=False):
        vars(cache).clear()
        vars(cache).update(vars(result))
    return [*caches, *results[len(caches) :]]


def spec_of_cached(x: Tensor, axis: str) -> P:
    """Returns the spec of a tensor in a cache, whose heads are sharded if ranks have other ones."""
    types = types_of(x, (axis,))
    assert types is not None  # a parallelized module is always checked
    return P(*[None] * _HEADS, axis) if V in types and x.ndim > _HEADS else P()

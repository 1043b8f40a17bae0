"""State that goes into a body and comes out: caches of keys and values, and buffers.

Caches, as those of transformers, are objects that a forward fills with tensors. A body gets a copy
with its rank's tensors. It returns what the copy then has, with which the object of the caller is
filled. So it does with the buffers that a forward writes into, as running statistics.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import optree
import torch
from torch import Tensor, nn

from shardmap_torch.core.tree import NAMESPACE, Tree, flatten, unflatten
from shardmap_torch.ops.body import types_of
from shardmap_torch.spec import P
from shardmap_torch.types import V

_TENSOR: Final = "the next tensor"
_NUMBER: Final = "the next number"

_HEADS: Final = 1
"""The dim of heads in a tensor [batch, heads, positions, features]."""


@dataclass(frozen=True)
class Frame:
    """An object without its tensors and counts.

    Attributes:
        kind: its class.
        entries: its attributes by name: frames for objects with such, and marks for these.
    """

    kind: type
    entries: dict[str, Any]

    def __hash__(self) -> int:
        """Hashes what has a hash."""
        return hash((self.kind, *self.entries))


@dataclass(frozen=True)
class Held:
    """A pytree without tensors: `Opened.frames`, or the number of the cache that stands here."""

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


class Opened:
    """Contents of caches.

    Attributes:
        tensors: by path.
        counts: integers, as of tokens seen: arguments, so that a verdict holds for other ones too.
        frames: the caches without these, and the paths of the integers.
    """

    def __init__(self, caches: Sequence[Any], before: Held | None = None) -> None:
        """Takes what caches hold out of them: after a body the integers that were there before.

        What a body sets anew, as a number of heads, may be one of its rank alone.
        """
        self.tensors: dict[str, Tensor] = {}
        self._known = None if before is None else frozenset(before.value[1])
        self._counts: dict[str, int] = {}
        frames = tuple(self._frame(cache, str(at)) for at, cache in enumerate(caches))
        self.frames, self.counts = Held((frames, (*self._counts,))), (*self._counts.values(),)

    def _frame(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            self.tensors[path] = value
            return _TENSOR
        if isinstance(value, int) and not isinstance(value, bool):  # as a symbol says that it is
            if self._known is not None and path not in self._known:
                return value
            self._counts[path] = value
            return _NUMBER
        if type(value) is list:
            return [self._frame(each, f"{path}.{at}") for at, each in enumerate(value)]
        if type(value) is dict:
            return {key: self._frame(each, f"{path}.{key}") for key, each in value.items()}
        return Frame(type(value), self._frame(vars(value), path)) if _is_part(value) else value


def _is_part(value: Any) -> bool:
    """Returns whether a value is a cache or a layer of one."""
    return hasattr(value, "reorder_cache") and not isinstance(value, type)


def closed(frames: Held, tensors: Sequence[Tensor], counts: Sequence[int]) -> list[Any]:
    """Rebuilds caches from what they hold."""
    remaining = {_TENSOR: iter(tensors), _NUMBER: iter(counts)}
    return [_close(frame, remaining) for frame in frames.value[0]]


def _close(frame: Any, remaining: Mapping[str, Iterator[Any]]) -> Any:
    if frame is _TENSOR or frame is _NUMBER:
        return next(remaining[frame])
    if type(frame) is list:
        return [_close(each, remaining) for each in frame]
    if type(frame) is dict:
        return {key: _close(each, remaining) for key, each in frame.items()}
    if not isinstance(frame, Frame):
        return frame
    cache: Any = object.__new__(frame.kind)
    vars(cache).update(_close(frame.entries, remaining))
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


_SPECS: Final = "_shardmap_specs"
"""The attribute of a cache that says how other programs, as that of a next layer, find it."""


def known_specs(caches: Sequence[Any]) -> dict[str, P]:
    """Returns the specs of what programs have put into caches, by path."""
    found = ((at, *each) for at, cache in enumerate(caches) for each in vars(cache).get(_SPECS, ()))
    return {f"{at}.{path}": spec for at, path, spec in found}


def note_specs(caches: Sequence[Any], cached: Mapping[str, P]) -> None:
    """Notes in caches the specs of what a program has put there."""
    known = {**known_specs(caches), **cached}
    for at, cache in enumerate(caches):
        start = f"{at}."
        own = {path[len(start) :]: each for path, each in known.items() if path.startswith(start)}
        vars(cache)[_SPECS] = (*own.items(),)


def spec_of_cached(x: Tensor, axis: str) -> P:
    """Returns the spec of a tensor in a cache, whose heads are sharded if ranks have other ones."""
    types = types_of(x, (axis,))
    assert types is not None  # a parallelized module is always checked
    return P(*[None] * _HEADS, axis) if V in types and x.ndim > _HEADS else P()


def copied(module: nn.Module, buffers: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Copies the buffers of a module in training, which are small beside its activations."""
    return {name: x.clone() for name, x in buffers.items()} if module.training else buffers


def written_into(given: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Returns the copies that a forward has written into; all where inference counts no writes."""
    copies = {name: x.detach() for name, x in own.items() if x is not given[name]}
    return {name: x for name, x in copies.items() if x.is_inference() or own[name]._version}


def write_buffers(module: nn.Module, written: Mapping[str, Tensor]) -> None:
    """Writes what a body has returned into the buffers of the module itself."""
    with torch.no_grad():
        for name, value in written.items():
            module.get_buffer(name).copy_(value)

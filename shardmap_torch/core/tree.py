"""Pytrees: flattening, and broadcasting a prefix tree of specs to the leaves of a value."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Generic, TypeAlias, TypeVar, final

import optree
import torch

from shardmap_torch.core.caching import Memo, Unguarded
from shardmap_torch.core.torch_private.engine import SUPPORTED_NODES
from shardmap_torch.errors import SpecError, counted, show

Tree: TypeAlias = Any
"""A pytree: nested tuples, lists, dicts, dataclasses registered with optree, and leaves."""

T = TypeVar("T")

NAMESPACE = "shardmap_torch"
"""The optree namespace in which users may register node types for this package alone."""


@final
@dataclass(frozen=True, slots=True)
class Traced:
    """The structure of a tree under torch.compile, which cannot trace optree's own.

    Attributes:
        rebuild: makes the node from its children; None for a leaf.
        node: its type and the names of its children; Dynamo cannot compare `rebuild`.
        children: the structures below.
    """

    rebuild: Callable[[list[Any]], Any] | None = field(compare=False)
    node: tuple[Any, ...] = ()
    children: "tuple[Traced, ...]" = ()

    def unflatten(self, leaves: Iterator[Any]) -> Tree:
        """Rebuilds the tree from the next leaves of the iterator."""
        if self.rebuild is None:
            return next(leaves)
        return self.rebuild([child.unflatten(leaves) for child in self.children])


_LEAF: Final = Traced(None)

Structure: TypeAlias = optree.PyTreeSpec | Traced
"""A structure that puts leaves back into a tree."""


def flatten(tree: Tree) -> tuple[list[Any], Structure]:
    """Returns the leaves of `tree` and its structure; None is an empty node."""
    if torch.compiler.is_dynamo_compiling():
        traced: list[Any] = []
        return traced, _trace(tree, traced)
    try:
        leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    except RecursionError:
        raise SpecError(
            f"A {type(tree).__name__} contains itself, or is nested too deep for a tree of tensors."
        ) from None
    nodes = [leaf for leaf in leaves if type(leaf) in SUPPORTED_NODES]
    if nodes:
        for node in nodes:
            _adopt(node)
        return flatten(tree)
    return leaves, structure


@final
@dataclass(frozen=True, slots=True)
class _Context:
    """The context that torch's registration keeps of a node beside its children, with a hash."""

    value: Any

    def __hash__(self) -> int:
        """Hashes what equal contexts have in common."""
        return hash(repr(self.value))


def _adopt(tree: Any) -> None:
    """Registers the type of a node with optree as torch knows it."""
    known = SUPPORTED_NODES[type(tree)]

    def open_node(tree: Any) -> tuple[list[Any], _Context, tuple[Any, ...]]:
        children, context = known.flatten_fn(tree)
        return list(children), _Context(context), tuple(_names(tree))

    def close_node(context: Any, children: Iterable[Any]) -> Any:
        return known.unflatten_fn(list(children), context.value)

    by_name = any(isinstance(name, str) and hasattr(tree, name) for name in _names(tree))
    entry = optree.GetAttrEntry if by_name else optree.GetItemEntry
    with suppress(ValueError):  # another thread has done so
        optree.register_pytree_node(
            type(tree), open_node, close_node, path_entry_type=entry, namespace=NAMESPACE
        )


def _names(tree: Any) -> Iterator[Any]:
    """Yields the names or positions of a node's children."""
    known = SUPPORTED_NODES[type(tree)]
    if known.flatten_with_keys_fn is None:
        yield from range(len(known.flatten_fn(tree)[0]))
        return
    for key, _ in known.flatten_with_keys_fn(tree)[0]:
        names = (getattr(key, name, None) for name in ("key", "name", "idx"))
        yield next((name for name in names if name is not None), str(key))


def flatten_like(structure: Structure, tree: Tree) -> tuple[list[Any], Structure]:
    """Flattens a tree that should have a structure: if it has, in a fifth of the time.

    Dicts of other kinds, as OrderedDict, are then taken for those of the structure.
    """
    if type(structure) is not Traced:
        try:
            leaves = structure.flatten_up_to(tree)
        except ValueError:  # another node
            return flatten(tree)
        if all([type(leaf) is torch.Tensor for leaf in leaves]):  # and no node in a leaf's place
            return leaves, structure
    return flatten(tree)


def entry_order(structure: Structure) -> list[tuple[Any, ...]]:
    """Returns the keys of each dict in its own order, in which equal structures may differ."""
    nodes: Any = structure.__getstate__()
    return [tuple(node[-1]) for node in nodes[0] if node[-1]]


def unflatten(structure: Structure, leaves: Iterable[Any]) -> Tree:
    """Rebuilds a tree with `leaves` in the order of `flatten`."""
    if type(structure) is Traced:
        return structure.unflatten(iter(leaves))
    return structure.unflatten(leaves)


def put(values: Sequence[T], places: Iterable[int], others: Iterable[T]) -> list[T]:
    """Returns values with others in these places, as many."""
    result = list(values)
    for place, other in zip(places, others, strict=True):
        result[place] = other
    return result


@dataclass(frozen=True, eq=False, slots=True)
class Known:
    """A prefix tree that is told apart by its identity, since hashing specs costs 1 us a leaf.

    Holds the tree and no structure of optree's, which Dynamo could not trace.

    Attributes:
        held: the tree, which must not change.
    """

    held: Unguarded[Tree]


def known(tree: Tree) -> Tree:
    """Makes a prefix tree `Known`, where Dynamo is not the one who would make it."""
    return tree if torch.compiler.is_dynamo_compiling() else Known(Unguarded(tree))


@dataclass(frozen=True, eq=False, slots=True)
class Flat:
    """A tree that stays flattened between functions of trees, since flattening costs 1 us a leaf.

    Who takes one writes into no leaf.

    Attributes:
        values: the leaves.
        structure: puts them back.
    """

    values: list[Any]
    structure: Structure


def opened(tree: Tree, like: Structure | None = None) -> tuple[list[Any], Structure]:
    """Flattens a tree, unless it is `Flat` already; `like` is the structure that it should have."""
    if type(tree) is Flat:
        return tree.values, tree.structure
    return flatten(tree) if like is None else flatten_like(like, tree)


def closed(like: Tree, structure: Structure, leaves: list[Any]) -> Tree:
    """Rebuilds a tree, or returns a `Flat` one if `like` is."""
    return Flat(leaves, structure) if type(like) is Flat else unflatten(structure, leaves)


def rebuilt(tree: Tree) -> Tree:
    """Rebuilds a tree that is `Flat` or `Known`."""
    if type(tree) is Known:
        return tree.held.value
    return unflatten(tree.structure, tree.values) if type(tree) is Flat else tree


def _is_leaf(tree: Tree, none_is_leaf: bool = False) -> bool:
    """Returns whether optree takes it for a leaf; Dynamo would trace how optree finds that out."""
    if type(tree) is torch.Tensor or type(tree) in _PLAIN:
        return type(tree) is torch.Tensor
    return optree.tree_is_leaf(tree, none_is_leaf=none_is_leaf, namespace=NAMESPACE)


_PLAIN: Final = (dict, list, tuple)
"""Nodes that Dynamo knows better than optree."""


def _trace(tree: Tree, leaves: list[Any]) -> Traced:
    if _is_leaf(tree):
        leaves.append(tree)
        return _LEAF
    level = _open(tree)
    children = tuple([_trace(child, leaves) for child in level.children])
    return Traced(level.rebuild, (type(tree), level.entries), children)


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `function` to each leaf, as `optree.tree_map` does."""
    try:
        return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)
    except RecursionError:
        flatten(tree)  # says so if the tree is too deep; else it is an error of `function`
        raise


def map_tensors(function: Callable[[torch.Tensor], Any], tree: Tree) -> Tree:
    """Applies `function` to each tensor, and keeps other leaves."""
    return map_leaves(lambda leaf: function(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A leaf value with its path and the spec that a prefix tree gives it."""

    path: str
    value: Any
    spec: T


@dataclass(frozen=True, slots=True)
class Mismatch:
    """A path at which the prefix tree and the value tree differ, and the reason."""

    path: str
    reason: str

    def __str__(self) -> str:
        """Formats it as `params['w']: specs have keys ...`."""
        return f"{self.path}: {self.reason}"


def broadcast_prefix(
    prefix: Tree, tree: Tree, path: str, is_spec: Callable[[Any], bool]
) -> Iterator[Placed[Any] | Mismatch]:
    """Yields every leaf of `tree` with the spec of its ancestor (or itself) in `prefix`.

    Leaves come in the order of `flatten`. Where `is_spec` holds, the spec covers all leaves below.

    Example:
        >>> prefix = {"a": 1, "b": 2}
        >>> leaves = broadcast_prefix(prefix, {"a": (10, 11), "b": 12}, "x", lambda s: s in (1, 2))
        >>> [(leaf.path, leaf.spec) for leaf in leaves]
        [("x['a'][0]", 1), ("x['a'][1]", 1), ("x['b']", 2)]
    """
    leaf = _is_leaf(tree)
    if is_spec(prefix) and leaf:
        yield Placed(path, tree, prefix)
    elif is_spec(prefix):
        level = _open(tree)
        for child, entry in zip(level.children, level.entries, strict=True):
            yield from broadcast_prefix(prefix, child, level.step(entry, path), is_spec)
    elif _is_leaf(prefix, none_is_leaf=True):
        yield Mismatch(path, f"{show(prefix)} is no spec; use P(...), or None for a static value")
    elif leaf:
        yield _differing_nodes(prefix, tree, path)
    else:
        yield from _broadcast_node(prefix, tree, path, is_spec)


@dataclass(frozen=True, eq=False, slots=True)
class Broadcast(Generic[T]):
    """The paths and specs of all leaves of a tree; one object for all trees of one structure."""

    paths: tuple[str, ...]
    specs: tuple[T, ...]
    mismatches: tuple[Mismatch, ...]


_BROADCASTS: Final = Memo[Broadcast[Any]]()


def broadcast_prefix_all(
    prefix: Tree, structure: Structure, tree: Tree, path: str, is_spec: Callable[[Any], bool]
) -> Broadcast[Any]:
    """Broadcasts specs like `broadcast_prefix`; caches the result by structures and specs.

    `structure` is that of `tree`. `is_spec` must be one function for all calls, and specs must be
    hashable. `prefix` may be `Known`, and `tree` be `Flat`.
    """
    by: tuple[Any, ...] = (prefix,)  # by identity
    if type(prefix) is not Known:
        specs, outline = flatten(prefix)
        by = (outline, tuple(specs))

    def find() -> "Broadcast[Any]":  # Dynamo cannot make the generic alias
        leaves = list(broadcast_prefix(rebuilt(prefix), rebuilt(tree), path, is_spec))
        placed = [leaf for leaf in leaves if isinstance(leaf, Placed)]
        return Broadcast(
            tuple([leaf.path for leaf in placed]),
            tuple([leaf.spec for leaf in placed]),
            tuple([leaf for leaf in leaves if isinstance(leaf, Mismatch)]),
        )

    return _BROADCASTS.get((path, structure, is_spec, *by), find)


def _broadcast_node(
    prefix: Tree, tree: Tree, path: str, is_spec: Callable[[Any], bool]
) -> Iterator[Placed[Any] | Mismatch]:
    specs, level = _open(prefix), _open(tree)
    if type(prefix) is not type(tree):
        yield _differing_nodes(prefix, tree, path)
    elif specs.entries != level.entries:
        yield Mismatch(path, _differing_entries(specs.entries, level))
    else:
        for spec, child, entry in zip(specs.children, level.children, level.entries, strict=True):
            yield from broadcast_prefix(spec, child, level.step(entry, path), is_spec)


@dataclass(frozen=True, slots=True)
class _Level:
    """A node opened by one level: its children, their keys, and how to rebuild it."""

    children: list[Any]
    entries: tuple[Any, ...]
    rebuild: Callable[[list[Any]], Any]
    step: Callable[[Any, str], str]


def _open(tree: Tree) -> _Level:
    if torch.compiler.is_dynamo_compiling() and type(tree) in _PLAIN:
        if type(tree) is dict:
            return _open_dict(tree)
        return _Level(list(tree), tuple(range(len(tree))), type(tree), _item)
    level = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    children, metadata, entries, unflatten_level = level
    step = partial(_codify, level.path_entry_type, type(tree), level.kind)
    return _Level(children, entries, partial(unflatten_level, metadata), step)


def _open_dict(tree: dict[Any, Any]) -> _Level:
    """Flattens a dict like optree, which Dynamo cannot trace if the dict holds no tensor."""
    keys = sorted(tree)

    def rebuild(children: list[Any]) -> dict[Any, Any]:
        new = dict(zip(keys, children, strict=True))
        return {key: new[key] for key in tree}

    return _Level([tree[key] for key in keys], tuple(keys), rebuild, _item)


def _codify(entry_type: Any, node_type: Any, kind: Any, entry: Any, path: str) -> str:
    step: str = entry_type(entry, node_type, kind).codify(path)
    return step


def _item(entry: Any, path: str) -> str:
    return f"{path}[{entry!r}]"


def _differing_nodes(prefix: Tree, tree: Tree, path: str) -> Mismatch:
    specs, value = type(prefix).__name__, type(tree).__name__
    return Mismatch(path, f"the specs have a {specs} here, the value is a {value}")


def _differing_entries(specs: tuple[Any, ...], level: _Level) -> str:
    value = level.entries
    if all(isinstance(entry, int) for entry in (*specs, *value)):
        items, lack = counted(len(specs), "item", "items"), len(specs) - len(value)
        shown = ", ".join(map(_described, level.children[:6])) + ", ..." * (len(value) > 6)
        inner = [x for x in level.children if type(x) in _PLAIN and len(x) - 1 == lack]
        star = f"; with a * before the {_described(inner[0])} it has {len(specs)}" if inner else ""
        return f"the specs have {items} here, the value has {len(value)}: {shown}{star}"
    missing = [entry for entry in value if entry not in specs]
    extra = [entry for entry in specs if entry not in value]
    parts = [f"no spec for {missing}"] * bool(missing) + [f"specs for absent {extra}"] * bool(extra)
    return "; ".join(parts)


def _described(tree: Tree) -> str:
    name = "Tensor" if isinstance(tree, torch.Tensor) else type(tree).__name__
    return f"{name} of {len(tree)}" if type(tree) in _PLAIN else name

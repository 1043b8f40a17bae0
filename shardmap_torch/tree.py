"""Pytrees: flattening, and spreading a prefix tree of specs over the leaves of a value."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeAlias, TypeVar

import optree

Tree: TypeAlias = Any
"""A pytree: nested tuples, lists, dicts, dataclasses registered with optree, and leaves."""

T = TypeVar("T")

NAMESPACE = "shardmap_torch"
"""The optree namespace in which users may register node types for this package alone."""


def flatten(tree: Tree) -> tuple[list[Any], optree.PyTreeSpec]:
    """The leaves of `tree` and its structure; None is an empty node."""
    leaves, structure = optree.tree_flatten(tree, namespace=NAMESPACE)
    return leaves, structure


def map_leaves(function: Callable[..., Any], tree: Tree, *rest: Tree) -> Tree:
    """Applies `function` to each leaf, as `optree.tree_map` does."""
    return optree.tree_map(function, tree, *rest, namespace=NAMESPACE)


@dataclass(frozen=True, slots=True)
class Placed(Generic[T]):
    """A leaf value, where it stands, and the spec that a prefix tree gives it."""

    path: str
    value: Any
    spec: T


@dataclass(frozen=True, slots=True)
class Misfit:
    """A place where the prefix tree and the value tree part ways."""

    path: str
    reason: str

    def __str__(self) -> str:
        """As in `params['w']: specs have keys ...`."""
        return f"{self.path}: {self.reason}"


def spread(
    prefix: Tree, tree: Tree, path: str, is_spec: Callable[[Any], bool]
) -> Iterator[Placed[Any] | Misfit]:
    """Yields every leaf of `tree` with the spec that stands above it in `prefix`.

    Leaves come in the order of `flatten`. Where `is_spec` holds, the spec covers all leaves below.

    Example:
        >>> found = spread({"a": 1, "b": 2}, {"a": (10, 11), "b": 12}, "x", lambda s: s in (1, 2))
        >>> [(leaf.path, leaf.spec) for leaf in found]
        [("x['a'][0]", 1), ("x['a'][1]", 1), ("x['b']", 2)]
    """
    if is_spec(prefix):
        accessors, leaves, _ = optree.tree_flatten_with_accessor(tree, namespace=NAMESPACE)
        for accessor, leaf in zip(accessors, leaves, strict=True):
            yield Placed(accessor.codify(path), leaf, prefix)
        return
    if optree.tree_is_leaf(tree, namespace=NAMESPACE):
        yield Misfit(path, f"the specs have a {_kind(prefix)} here, the value is {_article(tree)}")
        return
    yield from _spread_node(prefix, tree, path, is_spec)


def _spread_node(
    prefix: Tree, tree: Tree, path: str, is_spec: Callable[[Any], bool]
) -> Iterator[Placed[Any] | Misfit]:
    if optree.tree_is_leaf(prefix, none_is_leaf=True, namespace=NAMESPACE):
        yield Misfit(path, f"{prefix!r} is no spec; use P(...), or None for a static value")
        return
    value = optree.tree_flatten_one_level(tree, namespace=NAMESPACE)
    specs = optree.tree_flatten_one_level(prefix, none_is_leaf=True, namespace=NAMESPACE)
    if value.type is not specs.type:
        yield Misfit(path, f"the specs have a {_kind(prefix)} here, the value is a {_kind(tree)}")
    elif value.entries != specs.entries:
        yield Misfit(path, _differing_entries(specs.entries, value.entries))
    else:
        for spec, child, entry in zip(specs.children, value.children, value.entries, strict=True):
            step = value.path_entry_type(entry, value.type, value.kind)
            yield from spread(spec, child, step.codify(path), is_spec)


def _kind(tree: Tree) -> str:
    return type(tree).__name__


def _article(tree: Tree) -> str:
    return "None" if tree is None else f"a {_kind(tree)}"


def _differing_entries(specs: tuple[Any, ...], value: tuple[Any, ...]) -> str:
    if all(isinstance(entry, int) for entry in (*specs, *value)):
        return f"the specs have {len(specs)} items here, the value has {len(value)}"
    missing = [entry for entry in value if entry not in specs]
    extra = [entry for entry in specs if entry not in value]
    parts = [f"no spec for {missing}"] * bool(missing) + [f"specs for absent {extra}"] * bool(extra)
    return "; ".join(parts)

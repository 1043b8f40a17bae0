"""`match_specs`: specs for a tree of parameters, as patterns over the paths of its leaves."""

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

import optree

from shardmap_torch.core.tree import NAMESPACE, Tree, flatten, unflatten
from shardmap_torch.errors import SpecError, listing, show
from shardmap_torch.spec import P


def match_specs(tree: Tree, patterns: Mapping[str, P], *, default: P | None = None) -> Tree:
    """Makes a tree of specs: each leaf of `tree` gets that of the one pattern matching its path.

    The path of a leaf is its keys, indices and attribute names joined by dots, as in
    `layers.0.wq`. In a pattern `*` stands for any characters within one name, `**` for any number
    of names, none included, `?` for one character and `[abc]` for one of several. Nothing is
    communicated and no data is read: leaves need a `shape` only, if they have one.

    Args:
        tree: pytree of tensors, or of `ShapeDtype`.
        patterns: a spec for each pattern; each must match at least one leaf.
        default: the spec of leaves that no pattern matches; by default these are an error.

    Returns:
        A pytree like `tree` with a `P` in place of each leaf, for `in_specs`, `device_put` and the
        functions of `shardmap_torch.optim`.

    Raises:
        SpecError: a pattern that matches no leaf, a leaf that no pattern or several patterns match,
            a spec with more entries than its leaf has dims; lists all of them.

    Source: `match_partition_rules` of EasyLM and Levanter, without its order of precedence.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, match_specs
        >>> layer = {"wq": torch.ones(4, 4), "norm": torch.ones(4)}
        >>> specs = match_specs(
        ...     {"layers": [layer, layer], "head": torch.ones(4, 8)},
        ...     {"layers.*.wq": P(None, "tp"), "**.norm": P(), "head": P(None, "tp")},
        ... )
        >>> specs["layers"][1], specs["head"]
        ({'wq': P(None, 'tp'), 'norm': P()}, P(None, 'tp'))
    """
    _require_specs(patterns, default)
    leaves, structure = flatten(tree)
    paths = leaf_paths(tree)
    names = {pattern: pattern.split(".") for pattern in patterns}
    matches = [[glob for glob in patterns if is_match(p.split("."), names[glob])] for p in paths]
    used = {pattern for matching in matches for pattern in matching}
    problems = [_unused(pattern, paths) for pattern in patterns if pattern not in used]
    specs = []
    for path, leaf, matching in zip(paths, leaves, matches, strict=True):
        spec = patterns[matching[0]] if matching else default
        problems += _leaf_problems(path, leaf, spec, matching)
        specs.append(spec)
    if problems:
        raise SpecError(listing("match_specs: patterns and leaves do not match:", problems))
    return unflatten(structure, specs)


def leaf_paths(tree: Tree) -> list[str]:
    """Returns the path of each leaf, its names joined by dots, in the order of `flatten`.

    Example:
        >>> leaf_paths({"layers": [{"wq": 1}, {"wq": 2}]})
        ['layers.0.wq', 'layers.1.wq']
    """
    return [".".join(map(str, path)) for path in optree.tree_paths(tree, namespace=NAMESPACE)]


def is_match(names: Sequence[str], pattern: Sequence[str]) -> bool:
    """Returns whether the names of a path match those of a pattern."""
    if not pattern:
        return not names
    first, *rest = pattern
    if first == "**" and rest:
        return any(is_match(names[count:], rest) for count in range(len(names) + 1))
    if first == "**":  # the last one stands for at least the name of the leaf itself
        return bool(names)
    return bool(names) and fnmatchcase(names[0], first) and is_match(names[1:], rest)


def _unused(pattern: str, paths: Sequence[str]) -> str:
    near = difflib.get_close_matches(pattern, paths, n=1, cutoff=0.0)
    return f"pattern {pattern!r}: matches no leaf" + "".join(
        f"; the nearest is {n!r}" for n in near
    )


def _require_specs(patterns: object, default: object) -> None:
    if not isinstance(patterns, Mapping):
        raise SpecError("match_specs: the patterns are a mapping from paths to P(...).")
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise SpecError(f"match_specs: a pattern is a string, not {pattern!r}.")
    for spec in (*patterns.values(), *((default,) if default is not None else ())):
        if not isinstance(spec, P):
            raise SpecError(f"match_specs: {show(spec)} is no P(...).")


def _leaf_problems(path: str, leaf: Any, spec: P | None, patterns: Sequence[str]) -> Iterable[str]:
    if len(patterns) > 1:
        yield f"leaf {path!r}: matched by {' and '.join(map(repr, patterns))}"
    elif spec is None:
        yield f"leaf {path!r}: no pattern matches, and no default= is given"
    elif (shape := getattr(leaf, "shape", None)) is not None and len(spec.entries) > len(shape):
        yield f"leaf {path!r}: {spec!r} has {len(spec.entries)} entries, shape {tuple(shape)}"

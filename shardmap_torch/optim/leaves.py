"""Leaves of a tree with their paths and partition specs, matched once for each structure."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shardmap_torch.core.tree import (
    Broadcast,
    Placed,
    Structure,
    Tree,
    broadcast_prefix,
    broadcast_prefix_all,
    opened,
    rebuilt,
)
from shardmap_torch.errors import SpecError, listing
from shardmap_torch.ops.arguments import finest_specs
from shardmap_torch.spec import P, is_partition


@dataclass(frozen=True, eq=False, slots=True)
class Leaves:
    """The tensors of a tree in the order of `flatten`.

    Attributes:
        values: the tensors.
        structure: puts them back into the tree.
        paths: the path of each.
        specs: the spec of each, over the finest axes of the mesh.
    """

    values: list[Tensor]
    structure: Structure
    paths: tuple[str, ...]
    specs: tuple[P, ...]


def match_leaves(what: str, specs: Tree, tree: Tree, head: str) -> Leaves:
    """Matches the leaves of `tree`, named `what` in paths, with a prefix tree of specs.

    Both may be `Flat`.

    Raises:
        SpecError: the specs do not match, or a leaf is no tensor; `head` begins its message.
    """
    values, structure = opened(tree)
    matched: Broadcast[P] = broadcast_prefix_all(specs, structure, tree, what, is_partition)
    if matched.mismatches or not all([isinstance(leaf, Tensor) for leaf in values]):
        raise SpecError(listing(head, [*map(str, matched.mismatches), *_others(specs, tree, what)]))
    return Leaves(values, structure, matched.paths, finest_specs(matched.specs))


def _others(specs: Tree, tree: Tree, what: str) -> Iterator[str]:
    """Yields the leaves that have a spec and are no tensors."""
    for leaf in broadcast_prefix(rebuilt(specs), rebuilt(tree), what, is_partition):
        if isinstance(leaf, Placed) and not isinstance(leaf.value, Tensor):
            yield f"{leaf.path}: is no tensor but a {type(leaf.value).__name__}"

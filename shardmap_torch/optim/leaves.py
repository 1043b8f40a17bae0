"""Leaves of a tree with their paths and partition specs, matched once for each structure."""

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from shardmap_torch.core.caching import memo
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
from shardmap_torch.ops.body import mesh_of_body
from shardmap_torch.spec import P, expanded, is_partition


@dataclass(frozen=True, eq=False, slots=True)
class Leaves:
    """The tensors of a tree in the order of `flatten`.

    Attributes:
        values: the tensors.
        structure: puts them back into the tree.
        match: their paths, and their specs over the finest axes of the mesh; plans are cached by
            it, since it is one object for all trees alike.
    """

    values: list[Tensor]
    structure: Structure
    match: Broadcast[P]

    @property
    def paths(self) -> tuple[str, ...]:
        """The path of each."""
        return self.match.paths

    @property
    def specs(self) -> tuple[P, ...]:
        """The spec of each."""
        return self.match.specs


def match_leaves(what: str, specs: Tree, tree: Tree, head: str) -> Leaves:
    """Matches the leaves of `tree`, named `what` in paths, with a prefix tree of specs.

    `specs` may be `Known`, and `tree` be `Flat`.

    Raises:
        SpecError: the specs do not match, or a leaf is no tensor; `head` begins its message.
    """
    values, structure = opened(tree)
    matched: Broadcast[P] = broadcast_prefix_all(specs, structure, tree, what, is_partition)
    others = [leaf for leaf in values if type(leaf) is not Tensor]
    if matched.mismatches or not all([isinstance(leaf, Tensor) for leaf in others]):
        raise SpecError(listing(head, [*map(str, matched.mismatches), *_others(specs, tree, what)]))
    mesh = mesh_of_body()
    aliases = () if mesh is None else mesh.aliases
    return Leaves(values, structure, _finest(matched, aliases) if aliases else matched)


@memo
def _finest(
    matched: Broadcast[P], aliases: tuple[tuple[str, tuple[str, ...]], ...]
) -> Broadcast[P]:
    specs = tuple([expanded(spec, aliases) for spec in matched.specs])
    return Broadcast(matched.paths, specs, ())


def _others(specs: Tree, tree: Tree, what: str) -> Iterator[str]:
    """Yields the leaves that have a spec and are no tensors."""
    for leaf in broadcast_prefix(rebuilt(specs), rebuilt(tree), what, is_partition):
        if isinstance(leaf, Placed) and not isinstance(leaf.value, Tensor):
            yield f"{leaf.path}: is no tensor but a {type(leaf.value).__name__}"

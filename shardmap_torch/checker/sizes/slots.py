"""Sizes and numbers of a call, and what else it is."""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from shardmap_torch.boundary.call import Call
from shardmap_torch.boundary.matching import input_signature


@dataclass(frozen=True)
class Slot:
    """The place of one size or number among the arguments of a call.

    Attributes:
        position: of the argument.
        dim: of the tensor; None where the argument is a Python number.
        num_ranks: over how many ranks the dim is sharded.
        name: what messages call it.
    """

    position: int
    dim: int | None
    num_ranks: int
    name: str


def slots_of(call: Call) -> list[Slot]:
    """The sizes of all tensors, and the integers among static arguments."""
    found = []
    for position in call.crossing:
        path, sharded = call.match.paths[position], dict(call.match.spec(position).sharded_dims)
        for dim in range(call.leaves[position].ndim):
            num_ranks = call.mesh.num_ranks(sharded.get(dim, ()))
            found.append(Slot(position, dim, num_ranks, f"dim {dim} of {path}"))
    for position in _integers(call):
        found.append(Slot(position, None, 1, call.match.paths[position]))
    return found


def numbers_of(call: Call) -> tuple[int, ...]:
    """Reads the slots."""
    leaves = call.leaves
    sizes = [size for position in call.crossing for size in leaves[position].shape]
    return (*sizes, *[leaves[position] for position in _integers(call)])


def layout_of(key: Sequence[Any], call: Call) -> Hashable:
    """All of a signature but what stands in the slots; None where a tensor does not cross."""
    (_, values, *rest), leaves, static = key, call.leaves, call.match.static
    if len(call.crossing) + len(static) != len(leaves):
        return None
    known, kinds = dict(zip(static, values, strict=True)), list[Any]()
    for position, leaf in enumerate(leaves):
        kind = input_signature(leaf)
        if isinstance(leaf, Tensor):
            shape, *others = kind
            if not isinstance(shape, torch.Size):  # a nested tensor has none, and is refused
                return None
            kinds.append((len(shape), *others))
        else:
            kinds.append(kind if type(leaf) is int else (kind, known[position]))
    return (call.structure, call.mesh, call.mapped, call.match.specs, *kinds, *rest)


def outline_of(key: Sequence[Any], call: Call) -> Hashable:
    """Returns what `layout_of` depends on, in a fifth of the time; None where that is not known."""
    match, leaves = call.match, call.leaves
    if match.resized_from is None:
        return None
    static = zip(match.static, key[1], strict=True) if match.static else ()
    values = [value for at, value in static if type(leaves[at]) is not int]
    return (match.resized_from, *values, *key[2:])


def _integers(call: Call) -> list[int]:
    # A bool is no number that could be another one.
    return [position for position in call.match.static if type(call.leaves[position]) is int]

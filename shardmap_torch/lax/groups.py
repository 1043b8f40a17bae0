"""Collectives within groups of an axis' ranks, built from permutations of all of its ranks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.arguments import shown
from shardmap_torch.ops.index import axis_index


def gather_groups(x: Tensor, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]) -> Tensor:
    """Stacks the values of the group's members along a new leading dim, in the group's order."""
    size = len(groups[0])
    arrived = [x, *(ops.ppermute(x, axes, _round(groups, step)) for step in range(1, size))]
    return _in_group_order(arrived, axes, groups)


def exchange_groups(
    parts: Tensor, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Sends `parts[j]` to the group's member j; returns the parts for this rank, by member."""
    size = len(groups[0])
    position = _position(axes, groups, parts.device)
    arrived = []
    for step in range(size):
        part = parts[((position + step) % size).reshape(1)].squeeze(0)
        arrived.append(ops.ppermute(part, axes, _round(groups, step)) if step else part)
    return _in_group_order(arrived, axes, groups)


def _round(groups: tuple[tuple[int, ...], ...], step: int) -> list[tuple[int, int]]:
    """Returns the pairs of one round: every member sends to the one `step` positions on."""
    size = len(groups[0])
    return [(group[j], group[(j + step) % size]) for group in groups for j in range(size)]


def _in_group_order(
    arrived: Sequence[Tensor], axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> Tensor:
    """Orders `arrived[k]`, from k positions before this rank, by member, so that sums are equal."""
    size, device = len(groups[0]), arrived[0].device
    steps = (_position(axes, groups, device) - torch.arange(size, device=device)) % size
    return torch.stack(list(arrived))[steps]


def _position(
    axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    """Returns this rank's position in its group."""
    places = {rank: place for group in groups for place, rank in enumerate(group)}
    table = torch.tensor([places[rank] for rank in range(len(places))], device=device)
    return table[axis_index(axes).reshape(1)].squeeze(0)


def split(
    name: str,
    word: str,
    x: Tensor,
    dim: int,
    axes: tuple[str, ...],
    groups: tuple[tuple[int, ...], ...],
    tiled: bool,
) -> Tensor:
    """Splits `dim` into a new leading dim, one part for each member."""
    size, length = len(groups[0]), x.shape[dim]
    if length % size or (not tiled and length != size):
        need = "a multiple of" if tiled else "exactly"
        raise CollectiveError(
            f"{name}: {word} has size {length}; it must be {need} {size}, the size of the "
            f"axis_index_groups of {shown(axes)}."
        )
    split = x.unflatten(dim, (size, length // size)) if tiled else x
    return split.movedim(dim, 0)


def join(stacked: Tensor, dim: int, tiled: bool) -> Tensor:
    """Moves the leading dim to `dim`, or merges it into it."""
    placed = stacked.movedim(0, dim)
    return placed.flatten(dim, dim + 1) if tiled else placed

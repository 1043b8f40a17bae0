"""Reference implementation of data movements, on the stacked values of all ranks.

Defines every movement in differentiable tensor operations; both simulated strategies run it. A
value that is equal on all ranks has no leading dimension.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from shardmap_torch.collectives.moves import untiled_dims
from shardmap_torch.collectives.operations import Collective, Extremum
from shardmap_torch.errors import CollectiveError


@dataclass(frozen=True)
class Stack:
    """The values of n ranks: `[n, *local]` where they vary, `local` where they are equal."""

    value: Tensor
    varies: bool
    num_ranks: int

    def every(self) -> Tensor:
        """Returns all ranks' values along dim 0, as a view."""
        return self.value if self.varies else self.value.expand(self.num_ranks, *self.value.shape)

    def equal(self, value: Tensor) -> "Stack":
        """Makes the stack of a value that is equal on all ranks."""
        return Stack(value, False, self.num_ranks)

    def varying(self, value: Tensor) -> "Stack":
        """Makes the stack of one value per rank along dim 0."""
        return Stack(value, True, self.num_ranks)


def _sum(c: Collective, x: Stack) -> Stack:
    return x.equal(combined("sum", c, x.every()))


def _extremum(op: str, c: Collective, x: Stack) -> Stack:
    return x.equal(combined(op, c, x.value)) if x.varies else x


def combined(op: str, c: Collective | Extremum, every: Tensor) -> Tensor:
    """Combines values along dim 0, with one rounding: sums of halves are added in float32.

    A NaN among them is the result. A sum or an extremum that is zero may have either sign.

    Raises:
        CollectiveError: torch lacks the operation for the dtype.
    """
    try:
        return _COMBINE[op](every)
    except NotImplementedError:  # torch's unsigned integers and floats of eight bits
        dtype = str(every.dtype).removeprefix("torch.")
        called = c if op == "sum" or isinstance(c, Extremum) else Extremum(op, c)
        raise CollectiveError(
            f"{called}: torch cannot reduce {dtype} on {every.device.type}; convert the operand."
        ) from None


def _sum_of_ranks(x: Tensor) -> Tensor:
    """Sums over dim 0; other dims lie as they did, as a sum that transposes takes twice as long."""
    # torch promotes the sum of small integers; a collective keeps the dtype.
    dims = range(1, x.ndim)
    order = sorted(dims, key=x.stride, reverse=True)
    if order == [*dims]:
        return x.sum(0, dtype=x.dtype)
    return x.permute(0, *order).sum(0, dtype=x.dtype).permute([order.index(dim) for dim in dims])


_COMBINE: Final[Mapping[str, Callable[[Tensor], Tensor]]] = {
    "sum": _sum_of_ranks,
    "max": partial(torch.amax, dim=0),
    "min": partial(torch.amin, dim=0),
}


def _gather(c: Collective, x: Stack) -> Stack:
    return x.equal(gather(x.every(), c.dim, c.tiled, c.sizes))


def gather(stacked: Tensor, dim: int, tiled: bool, sizes: Sequence[int] | None) -> Tensor:
    """Concatenates `[n, *local]` along `dim` of the local shape, or inserts a new dim there."""
    if sizes is not None:
        parts = [stacked[r].narrow(dim, 0, size) for r, size in enumerate(sizes)]
        return torch.cat(parts, dim)
    placed = stacked.movedim(0, dim)
    return placed.flatten(dim, dim + 1) if tiled else placed


def scatter(
    full: Tensor, dim: int, tiled: bool, sizes: Sequence[int] | None, num_ranks: int
) -> Tensor:
    """Splits `full` along `dim` into `[n, *local]`; inverse of `gather`."""
    if sizes is not None:
        ends = [sum(sizes[: r + 1]) for r in range(num_ranks)]
        parts = [
            fill(full.narrow(dim, end - size, size), dim, max(sizes))
            for end, size in zip(ends, sizes, strict=True)
        ]
        return torch.stack(parts)
    split = full.unflatten(dim, (num_ranks, full.shape[dim] // num_ranks)) if tiled else full
    return split.movedim(dim, 0)


def fill(x: Tensor, dim: int, length: int) -> Tensor:
    """Appends zeros along `dim` up to `length`."""
    missing = length - x.shape[dim]
    if missing == 0:
        return x
    shape = list(x.shape)
    shape[dim] = missing
    return torch.cat([x, x.new_zeros(shape)], dim)


def _slice(c: Collective, x: Stack) -> Stack:
    if not x.varies:
        return x.varying(scatter(x.value, c.dim, c.tiled, c.sizes, x.num_ranks))
    own = [scatter(x.value[r], c.dim, c.tiled, c.sizes, x.num_ranks)[r] for r in range(x.num_ranks)]
    return x.varying(torch.stack(own))


def _pad(c: Collective, x: Stack) -> Stack:
    own = [
        place(local, c.dim, c.tiled, c.sizes, rank, x.num_ranks)
        for rank, local in enumerate(x.every().unbind(0))
    ]
    return x.varying(torch.stack(own))


def place(
    local: Tensor, dim: int, tiled: bool, sizes: Sequence[int] | None, rank: int, num_ranks: int
) -> Tensor:
    """Pads a rank's shard with zeros to the full size; the transpose of slicing it out."""
    if not tiled:
        local = local.unsqueeze(dim)
    length = local.shape[dim]
    sizes = sizes if sizes is not None else (length,) * num_ranks
    before, own, after = sum(sizes[:rank]), sizes[rank], sum(sizes[rank + 1 :])
    parts = [_zeros_along(local, dim, before), local.narrow(dim, 0, own)]
    return torch.cat([*parts, _zeros_along(local, dim, after)], dim)


def _zeros_along(like: Tensor, dim: int, length: int) -> Tensor:
    shape = list(like.shape)
    shape[dim] = length
    return like.new_zeros(shape)


def _sum_scatter(c: Collective, x: Stack) -> Stack:
    return _slice(c, _sum(c, x))


def _exchange(c: Collective, x: Stack) -> Stack:
    # An all-to-all gives what gathering along one dim and slicing along the other gives.
    if c.tiled and c.dim == c.concat_dim:
        return x.varying(_transpose(x.every(), c.dim + 1, x.num_ranks))
    gather_dim, split_dim = untiled_dims(c) if not c.tiled else (c.concat_dim, c.dim)
    full = gather(x.every(), gather_dim, c.tiled, c.concat_sizes)
    return x.varying(scatter(full, split_dim, c.tiled, c.sizes, x.num_ranks))


def _transpose(every: Tensor, dim: int, num_ranks: int) -> Tensor:
    """Swaps the ranks with the blocks of `dim`, as an all-to-all along one dim does."""
    blocks = every.unflatten(dim, (num_ranks, every.shape[dim] // num_ranks))
    transposed: Tensor = blocks.transpose(0, dim)
    return transposed.flatten(dim, dim + 1)


def _ragged(c: Collective, x: Stack) -> Stack:
    every = x.every()
    blocks = [local.split(counts) for local, counts in zip(every, with_rest(c), strict=True)]
    joined = [torch.cat([own[rank] for own in blocks]) for rank in range(x.num_ranks)]
    return x.varying(torch.stack([fill(rows, 0, c.lengths[1]) for rows in joined]))


def with_rest(c: Collective) -> list[list[int]]:
    """Returns the counts of each rank's rows, by receiver, and then of those that nobody gets."""
    return [[*counts, c.lengths[0] - sum(counts)] for counts in c.counts]


def _permute(c: Collective, x: Stack) -> Stack:
    every = x.every()
    source = {target: source for source, target in c.perm}
    index = torch.tensor([source.get(r, 0) for r in range(x.num_ranks)], device=every.device)
    # Behind a dim of one entry: torch selects no rows of unsigned integers in one dim.
    moved = every.unsqueeze(-1).index_select(0, index).squeeze(-1)
    if len(source) == x.num_ranks:
        return x.varying(moved)
    hit = [r in source for r in range(x.num_ranks)]
    return x.varying(_only(moved, torch.tensor(hit, device=every.device)))


def _only(every: Tensor, ranks: Tensor) -> Tensor:
    mask = ranks.reshape(-1, *[1] * (every.ndim - 1))
    return torch.where(mask, every, every.new_zeros(()))


def _broadcast(c: Collective, x: Stack) -> Stack:
    return x.equal(x.every()[c.source])


def _mask(c: Collective, x: Stack) -> Stack:
    every = x.every()
    ranks = torch.arange(x.num_ranks, device=every.device) == c.source
    return x.varying(_only(every, ranks))


def _sum_mask(c: Collective, x: Stack) -> Stack:
    return _mask(c, _sum(c, x))


def _same(c: Collective, x: Stack) -> Stack:
    return x


REFERENCE: Final[Mapping[str, Callable[[Collective, Stack], Stack]]] = MappingProxyType(
    {
        "sum": _sum,
        "max": partial(_extremum, "max"),
        "min": partial(_extremum, "min"),
        "gather": _gather,
        "slice": _slice,
        "pad": _pad,
        "sum_scatter": _sum_scatter,
        "exchange": _exchange,
        "ragged": _ragged,
        "permute": _permute,
        "broadcast": _broadcast,
        "mask": _mask,
        "sum_mask": _sum_mask,
        "same": _same,
    }
)
"""Functions of movements on the values of all ranks."""

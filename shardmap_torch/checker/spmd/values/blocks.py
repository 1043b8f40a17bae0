"""Blocks of a dim, one a rank, which one device has as one: what Megatron's chunk and cat make.

`torch.distributed` gathers and scatters along dim 0. Along another dim, `cat(x.chunk(n), dim)` goes
between blocks that lie behind one another in dim 0 and that dim; on one device n is 1.
"""

from dataclasses import dataclass, replace
from typing import Final

import torch

from shardmap_torch.checker.spmd.layout import (
    ANY,
    BLOCK,
    BLOCKS,
    Dim,
    ShardedTensor,
    UnrelatedError,
    axes_of,
    fitted,
    is_stacked,
    merged,
    unsharded,
)
from shardmap_torch.checker.spmd.recorder import TensorMap
from shardmap_torch.checker.spmd.sharded import PairedCall
from shardmap_torch.checker.spmd.state import Notes

aten = torch.ops.aten

_SPLITS: Final = frozenset({aten.split.Tensor, aten.split_with_sizes.default})


@dataclass(frozen=True)
class _Block:
    """The block of that index, of `count`, of a dim of a tensor of the one-device program."""

    number: int
    index: int
    count: int
    dim: int


class Blocks:
    """Keeps the blocks that ranks have as tensors of their own, until they are joined in order."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._known: TensorMap[_Block] = TensorMap()

    def lay_out(self, call: PairedCall) -> bool:
        """Notes the blocks that a split gives, or what they are joined to; False for other steps.

        Raises:
            UnrelatedError: the blocks are not those of a value on one device.
        """
        if call.op in _SPLITS and len(call.results) > len(call.event.results) == 1:
            return self._split(call)
        if call.op is aten.cat.default:
            return len(call.tensors) > len(call.event.arguments["tensors"]) and self._join(call)
        return False

    def _split(self, call: PairedCall) -> bool:
        (x,), count = call.tensors, len(call.results)
        self._notes.reject_unfinished(x)
        shard = self._notes.find(x, call.event.arguments["self"], "self", takes_stacks=True)
        dim = call.arguments["dim"] % len(shard.dims)
        found = divided(shard, dim, count)
        ((number, shape),) = call.event.results
        if found is None or any(y.shape[dim] * count != x.shape[dim] for y in call.results):
            return False
        at, dims = found
        for index, y in enumerate(call.results):
            self._notes.note(y, number, fitted(dims, tuple(y.shape), shape))
            self._known.put(y, _Block(number, index, count, at))
        return True

    def _join(self, call: PairedCall) -> bool:
        there, *others = call.event.arguments["tensors"]
        first, *more = [self._known.get(x) for x in call.tensors]
        if others or first is None:
            return False
        if [first, *more] != [replace(first, index=index) for index in range(first.count)]:
            raise UnrelatedError(
                "it joins other blocks of a dim than all of them, in order",
                "join what chunk(n) gave: torch.cat(x.chunk(n, dim), other_dim).",
            )
        shard = self._notes.find(call.tensors[0], there, "tensors", takes_stacks=True)
        dim = call.arguments["dim"] % len(shard.dims)
        ((number, shape),) = call.event.results
        dims = joined(shard, first.dim, dim, first.count)
        self._notes.note(call.results[0], number, fitted(dims, tuple(call.results[0].shape), shape))
        self._notes.set_sums(call.results[0], self._notes.sums(call.tensors[0]))
        return True


def divided(x: ShardedTensor, dim: int, count: int) -> tuple[int, tuple[Dim, ...]] | None:
    """Returns the dim of which `x.chunk(count, dim)` gives blocks, and the layout of each.

    Example:
        >>> x = ShardedTensor.unsharded((4, 6))
        >>> divided(x, 1, 2)
        (1, (((None, 4),), (('>', 2), (None, 3))))
    """
    dims, digits = [*x.dims], x.dims[dim]
    if digits[:1] == ((BLOCKS, count),):
        dims[dim] = digits[1:]
        return next(at for at, each in enumerate(dims) if each[:1] == ((BLOCK, count),)), (*dims,)
    if is_stacked(x.dims) or digits == ANY or axes_of(digits) or x.local[dim] % count:
        return None
    dims[dim] = ((BLOCK, count), *unsharded(x.local[dim] // count))
    return dim, (*dims,)


def joined(x: ShardedTensor, at: int, dim: int, count: int) -> tuple[Dim, ...]:
    """Lays out the blocks of dim `at` after they have been joined along `dim`.

    Example:
        >>> x = ShardedTensor((((None, 4),), ((BLOCK, 2), (None, 3))), (4, 3), (4, 6))
        >>> joined(x, 1, 1, 2)
        (((None, 4),), ((None, 6),))
        >>> joined(x, 1, 0, 2)
        ((('<', 2), (None, 4)), (('>', 2), (None, 3)))
    """
    dims = [*x.dims]
    if dim == at:
        dims[at] = tuple(merged([(None, count), *dims[at][1:]]))
    else:
        dims[dim] = ((BLOCKS, count), *dims[dim])
    return tuple(dims)

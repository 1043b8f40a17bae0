"""Collectives as data: one call of a typed function, and what it does to all ranks' values."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Literal

import torch
from torch import Tensor

from shardmap_torch import (
    I,
    Partial,
    R,
    V,
    all_gather,
    all_reduce,
    all_to_all,
    axis_size,
    broadcast,
    convert,
    ppermute,
    reduce_scatter,
    reinterpret,
    shift,
)
from shardmap_torch.types import AxisType


@dataclass(frozen=True)
class Communication:
    """A call of a collective; what depends on the number of ranks is made when it runs.

    Attributes:
        name: of the function.
        axes: over which it runs, the first of them major.
        src: type of the operand, where the function asks for it.
        dst: type of the result, where the function asks for it.
        op: of `all_reduce` and `reduce_scatter`.
        dim: that is joined, split or sharded.
        tiled: whether that dim stays.
        uneven: whether the ranks' shards differ in length.
    """

    name: str
    axes: tuple[str, ...]
    src: AxisType | None = None
    dst: AxisType | None = None
    op: Literal["sum", "mean", "max", "min"] = "sum"
    dim: int = 0
    tiled: bool = True
    uneven: bool = False

    @property
    def axis(self) -> str | tuple[str, ...]:
        """Returns the axis as users write it."""
        return self.axes[0] if len(self.axes) == 1 else self.axes

    @property
    def takes(self) -> AxisType:
        """The type that the operand must have."""
        if self.src is not None:
            return self.src
        sums = self.name in ("all_reduce", "reduce_scatter") and self.op in ("sum", "mean")
        return Partial if sums else V

    def on_mesh(self, x: Tensor) -> Tensor:
        """Calls the library."""
        return _CALLS[self.name](self, self._shard(x, axis_size(self.axis)))

    def on_one_device(self, xs: Sequence[Tensor]) -> list[Tensor]:
        """The results of all ranks of one group."""
        shards = [self._shard(x, len(xs)) for x in xs]
        if self.name in ("convert", "reinterpret"):
            return _CONVERSIONS[self.name, self.src, self.dst](self, shards)
        return _MOVES[self.name](self, shards)

    def sizes(self, num_ranks: int) -> tuple[int, ...] | None:
        """True lengths of uneven shards: 1, 2, 3, 1, 2, ..."""
        return tuple(1 + rank % 3 for rank in range(num_ranks)) if self.uneven else None

    def _shard(self, x: Tensor, num_ranks: int) -> Tensor:
        """An operand of the length that the call asks for."""
        sizes = self.sizes(num_ranks)
        splits = self.name in ("reduce_scatter", "all_to_all")
        if sizes is not None:
            x = x.narrow(self.dim, 0, sum(sizes) if splits else max(sizes))
        elif splits and not self.tiled:
            x = x.narrow(self.dim, 0, num_ranks)
        if sizes is not None and self.name == "all_to_all":
            x = x.narrow(1 - self.dim, 0, max(sizes))
        return x


def _exchange(call: Communication, x: Tensor) -> Tensor:
    sizes = call.sizes(axis_size(call.axis))
    return all_to_all(
        x,
        call.axis,
        split_dim=call.dim,
        concat_dim=1 - call.dim,
        tiled=call.tiled,
        split_sizes=sizes,
        concat_sizes=None if sizes is None else sizes,
    )


def _turn(call: Communication, x: Tensor) -> Tensor:
    return ppermute(x, call.axis, _pairs(axis_size(call.axis)))


def _pairs(num_ranks: int) -> list[tuple[int, int]]:
    """No ring: the last sends to the first, the first to the second; others receive nothing."""
    return [(num_ranks - 1, 0), (0, 1)][: num_ranks if num_ranks < 3 else 2]


def _gather(call: Communication, x: Tensor) -> Tensor:
    sizes = call.sizes(axis_size(call.axis))
    assert call.dst is not None
    return all_gather(x, call.axis, dim=call.dim, dst=call.dst, tiled=call.tiled, sizes=sizes)


def _scatter(call: Communication, x: Tensor) -> Tensor:
    sizes = call.sizes(axis_size(call.axis))
    op: Any = call.op
    return reduce_scatter(x, call.axis, dim=call.dim, op=op, tiled=call.tiled, sizes=sizes)


def _cast(call: Communication, x: Tensor) -> Tensor:
    assert call.src is not None
    assert call.dst is not None
    dim = call.dim if V in (call.src, call.dst) else None
    return convert(x, call.axis, src=call.src, dst=call.dst, dim=dim)


_CALLS: Final[Mapping[str, Callable[[Communication, Tensor], Tensor]]] = {
    "all_reduce": lambda c, x: all_reduce(x, c.axis, dst=c.dst or I, op=c.op),
    "all_gather": _gather,
    "reduce_scatter": _scatter,
    "all_to_all": _exchange,
    "ppermute": _turn,
    "shift": lambda c, x: shift(x, c.axis, 1, wrap=c.tiled),
    "broadcast": lambda c, x: broadcast(x, c.axis, axis_size(c.axis) - 1, dst=c.dst or I),
    "convert": _cast,
    "reinterpret": lambda c, x: reinterpret(x, c.axis, src=c.src or R, dst=c.dst or V),
}


# ------------------------------------------------------------------- the same, on one device

Xs = Sequence[Tensor]


def _combined(c: Communication, xs: Xs) -> list[Tensor]:
    stacked = torch.stack(list(xs))
    program_paths: Mapping[str, Callable[[int], Tensor]] = {
        "sum": stacked.sum,
        "mean": stacked.mean,
        "max": stacked.amax,
        "min": stacked.amin,
    }
    return [program_paths[c.op](0)] * len(xs)


def _shards(c: Communication, whole: Tensor, num_ranks: int) -> list[Tensor]:
    if not c.tiled:
        return list(whole.unbind(c.dim))
    sizes = c.sizes(num_ranks)
    if sizes is None:
        return list(whole.chunk(num_ranks, c.dim))
    return [_lengthened(part, c.dim, max(sizes)) for part in whole.split(sizes, c.dim)]


def _lengthened(part: Tensor, dim: int, length: int) -> Tensor:
    shape = list(part.shape)
    shape[dim] = length - shape[dim]
    return torch.cat([part, part.new_zeros(shape)], dim)


def _joined(c: Communication, xs: Xs, dim: int) -> Tensor:
    if not c.tiled:
        return torch.stack(list(xs), dim)
    sizes = c.sizes(len(xs)) or [x.shape[dim] for x in xs]
    return torch.cat([x.narrow(dim, 0, size) for x, size in zip(xs, sizes, strict=True)], dim)


def _scattered(c: Communication, xs: Xs) -> list[Tensor]:
    return _shards(c, _combined(c, xs)[0], len(xs))


def _exchanged(c: Communication, xs: Xs) -> list[Tensor]:
    sent = [_shards(c, x, len(xs)) for x in xs]
    return [_joined(c, [row[rank] for row in sent], 1 - c.dim) for rank in range(len(xs))]


def _permuted(pairs: Sequence[tuple[int, int]], xs: Xs) -> list[Tensor]:
    out = [torch.zeros_like(x) for x in xs]
    for source, target in pairs:
        out[target] = xs[source]
    return out


def _shifted(c: Communication, xs: Xs) -> list[Tensor]:
    n = len(xs)
    return _permuted([(r, (r + 1) % n) for r in range(n) if c.tiled or r + 1 < n], xs)


_MOVES: Final[Mapping[str, Callable[[Communication, Xs], list[Tensor]]]] = {
    "all_reduce": _combined,
    "all_gather": lambda c, xs: [_joined(c, xs, c.dim)] * len(xs),
    "reduce_scatter": _scattered,
    "all_to_all": _exchanged,
    "ppermute": lambda c, xs: _permuted(_pairs(len(xs)), xs),
    "shift": _shifted,
    "broadcast": lambda c, xs: [xs[-1]] * len(xs),
}


def _same(c: Communication, xs: Xs) -> list[Tensor]:
    return list(xs)


def _first_only(c: Communication, xs: Xs) -> list[Tensor]:
    return [xs[0], *(torch.zeros_like(x) for x in xs[1:])]


def _own_piece(c: Communication, xs: Xs) -> list[Tensor]:
    return [x.chunk(len(xs), c.dim)[rank] for rank, x in enumerate(xs)]


def _in_place(c: Communication, xs: Xs) -> list[Tensor]:
    zeros = [torch.zeros_like(x) for x in xs]
    return [torch.cat([*zeros[:rank], x, *zeros[rank + 1 :]], c.dim) for rank, x in enumerate(xs)]


_CONVERSIONS: Final[Mapping[tuple[Any, ...], Callable[[Communication, Xs], list[Tensor]]]] = {
    ("convert", I, R): _same,
    ("convert", R, I): _same,
    ("convert", I, V): _own_piece,
    ("convert", R, V): _own_piece,
    ("convert", I, Partial): _first_only,
    ("convert", R, Partial): _first_only,
    ("convert", V, Partial): _in_place,
    ("reinterpret", R, V): _same,
    ("reinterpret", V, Partial): _same,
    ("reinterpret", R, Partial): _same,
}

CONVERSIONS: Final = tuple(_CONVERSIONS)

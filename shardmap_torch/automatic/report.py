"""Reports of the data that sharding propagation moves, by line and bytes."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch.distributed.tensor import Partial, Placement, Replicate

from shardmap_torch.core.source_location import Site
from shardmap_torch.errors import show_shape


@dataclass(frozen=True)
class Redistribution:
    """A tensor that is redistributed because an operation needs other placements.

    Attributes:
        op: the operation, `mark_sharding`, "result" or "gradient".
        site: the user's line; in a backward that of the forward.
        in_backward: whether it happens in the backward.
        shape: the global shape.
        dtype: of the tensor.
        src: the placements before, one for each mesh axis.
        dst: the placements after.
        num_bytes: bytes that each rank sends.
        is_implicit: whether the user has not asked for it.
        axes: names of the mesh axes of the placements, if these are not all of the mesh.
    """

    op: str
    site: Site | None
    in_backward: bool
    shape: tuple[int, ...]
    dtype: torch.dtype
    src: tuple[Placement, ...]
    dst: tuple[Placement, ...]
    num_bytes: int
    is_implicit: bool
    axes: tuple[str, ...] = ()

    def __str__(self) -> str:
        """Formats it as `mm: float32[8, 4] (S(0)) -> (R), sends 96 B  # model.py:3: y = x @ w`."""
        layouts = f"({shown(self.src)}) -> ({shown(self.dst)})"
        layouts += f" over {', '.join(self.axes)}" * bool(self.axes)
        where = f"  # {self.site}" if self.site is not None else ""
        is_named = self.in_backward and self.site is not None
        name = self.op + " backward" * is_named + " (asked for)" * (not self.is_implicit)
        shape = show_shape(self.dtype, self.shape)
        return f"{name}: {shape} {layouts}, sends {self.num_bytes} B{where}"


@dataclass(frozen=True)
class Redistributions:
    """Redistributions in order.

    Attributes:
        moves: those that send something or change placements.
    """

    moves: list[Redistribution]

    @property
    def num_bytes(self) -> int:
        """Counts the bytes that each rank sends, forward and backward."""
        return sum(move.num_bytes for move in self.moves)

    @property
    def implicit(self) -> tuple[Redistribution, ...]:
        """The redistributions that the user has not asked for."""
        return tuple(move for move in self.moves if move.is_implicit)

    def __str__(self) -> str:
        """A line for each redistribution, and the sum."""
        lines = [f"  {move}" for move in self.moves] or ["  nothing is redistributed"]
        return "\n".join([*lines, f"each rank sends {self.num_bytes} B"])


def shown(placements: Sequence[Placement]) -> str:
    """Formats placements as `S(0), R, P`."""
    return ", ".join(map(_short, placements))


def _short(placement: Placement) -> str:
    if isinstance(placement, Replicate):
        return "R"
    if isinstance(placement, Partial):
        return "P" if placement.reduce_op == "sum" else f"P({placement.reduce_op})"
    dim = getattr(placement, "dim", None)
    return f"S({dim})" if dim is not None else str(placement)


def bytes_sent(
    shape: Sequence[int],
    dtype: torch.dtype,
    src: Sequence[Placement],
    dst: Sequence[Placement],
    sizes: Sequence[int],
) -> int:
    """Counts the bytes that each rank sends by ring algorithms, from the last axis to the first.

    An estimate where several axes change at once: torch may take them in another order.

    Example:
        >>> from torch.distributed.tensor import Shard
        >>> bytes_sent([8], torch.float32, [Shard(0)], [Replicate()], [4])  # 3 times 2 entries
        24
    """
    local = prod(shape) * dtype.itemsize
    for placement, size in zip(src, sizes, strict=True):
        local //= size if placement.is_shard() else 1
    total = 0
    for old, new, size in reversed(list(zip(src, dst, sizes, strict=True))):
        if old == new:
            continue
        if old.is_shard() and not new.is_shard():
            total += (size - 1) * local
            local *= size
        elif old.is_shard():
            total += (size - 1) * local // size
        elif old.is_partial():
            total += (size - 1) * local // size * (1 if new.is_shard() else 2)
            local //= size if new.is_shard() else 1
        else:
            local //= size if new.is_shard() else 1
    return total

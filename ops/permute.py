"""Collectives that send each rank's value to at most one other rank: ppermute, shift."""

from collections import Counter
from collections.abc import Iterable
from typing import Any, TypeVar

import torch

from shardmap_torch.collectives.autograd import issue
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.ops.arguments import (
    Axis,
    collective_in,
    each_leaf,
    for_operand,
    read_axes,
    read_items,
    shown,
)
from shardmap_torch.types import V

X = TypeVar("X")


def ppermute(
    x: X,
    axis: Axis,
    perm: Iterable[tuple[int, int]],
    *,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> X:
    """Sends the value of rank s to rank t for every pair (s, t); other ranks get zeros.

    Shape: unchanged. Types: V stays V. Backward: ppermute by the inverse pairs. A rank that is a
    source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        perm: pairs (source, target), positions along the axis.
        comm_dtype: dtype in which the values are sent.
        grad_comm_dtype: dtype in which the cotangents are sent.

    Raises:
        CollectiveError: outside a body, unknown axis, no such rank, or a rank that is the source
            or the target of two pairs.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `jax.lax.ppermute`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, ppermute, shard_map
        >>> mesh = make_mesh((4,), ("pp",), kind="simulated")
        >>> f = lambda x: ppermute(x, "pp", [(0, 1), (1, 2), (2, 3)])
        >>> shard_map(f, mesh=mesh, in_specs=(P("pp"),), out_specs=P("pp"))(torch.arange(1.0, 5.0))
        tensor([0., 1., 2., 3.])
    """
    axes, scope = read_axes("ppermute", axis)
    pairs = _read_pairs(perm, axes, scope.backend.mesh.num_ranks(axes))
    dtypes = comm_dtype, grad_comm_dtype
    collective = collective_in(dtypes, "ppermute", V, V, axes, perm=pairs)
    return each_leaf("ppermute", x, lambda leaf: issue(scope, for_operand(collective, leaf), leaf))


def shift(
    x: X,
    axis: Axis,
    offset: int,
    *,
    wrap: bool = True,
    comm_dtype: torch.dtype | None = None,
    grad_comm_dtype: torch.dtype | None = None,
) -> X:
    """Sends each rank's value `offset` ranks up the axis: rank r gets the value of rank r - offset.

    Without `wrap` nothing is sent past either end, and the ranks that receive nothing get zeros.

    Shape: unchanged. Types: V stays V. Backward: shift by -offset. Sends x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis: an axis name, or several that act as one.
        offset: number of ranks to move by; may be negative.
        wrap: whether values sent past one end arrive at the other.
        comm_dtype: dtype in which the values are sent.
        grad_comm_dtype: dtype in which the cotangents are sent.

    Raises:
        CollectiveError: outside a body, or unknown axis.
        ShardTypeError: in a checked body, for `x` of another type.

    Source: `jax.lax.pshuffle`; `numpy.roll` over the ranks.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, make_mesh, shard_map, shift
        >>> mesh = make_mesh((4,), ("pp",), kind="simulated")
        >>> f = lambda x: shift(x, "pp", 1)
        >>> shard_map(f, mesh=mesh, in_specs=(P("pp"),), out_specs=P("pp"))(torch.arange(4.0))
        tensor([3., 0., 1., 2.])
    """
    axes, scope = read_axes("shift", axis)
    num_ranks = scope.backend.mesh.num_ranks(axes)
    if not isinstance(offset, int) or isinstance(offset, bool):
        raise CollectiveError(f"shift: offset={show(offset)} is no integer.")
    ends = ((rank, rank + offset) for rank in range(num_ranks))
    pairs = [(s, t % num_ranks) for s, t in ends if wrap or 0 <= t < num_ranks]
    return ppermute(x, axis, pairs, comm_dtype=comm_dtype, grad_comm_dtype=grad_comm_dtype)


def _read_pairs(
    perm: Iterable[tuple[int, int]], axes: tuple[str, ...], num_ranks: int
) -> tuple[tuple[int, int], ...]:
    pairs = read_items("ppermute", "perm", perm)
    wrong = [pair for pair in pairs if not _is_pair(pair)]
    if wrong:
        raise CollectiveError(
            f"ppermute: perm takes pairs (source, target) of integers, not {show(wrong[0])}."
        )
    outside = sorted({r for pair in pairs for r in pair if not 0 <= r < num_ranks})
    if outside:
        raise CollectiveError(
            f"ppermute: {outside} are none of the {num_ranks} ranks of {shown(axes)}."
        )
    for word, ranks in zip(("source", "target"), zip(*pairs, strict=True), strict=False):
        twice = sorted(rank for rank, count in Counter(ranks).items() if count > 1)
        if twice:
            raise CollectiveError(f"ppermute: {twice} are the {word} of more than one pair.")
    return tuple(sorted((source, target) for source, target in pairs))


def _is_pair(value: Any) -> bool:
    return (
        isinstance(value, tuple | list)
        and len(value) == 2
        and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in value)
    )

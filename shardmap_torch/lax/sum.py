"""Sums and means of `jax.lax`: psum, pmean and psum_scatter over the ranks of an axis."""

from typing import TypeVar

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.lax.arguments import ANY, Groups, combined, each_leaf_or_number, read
from shardmap_torch.lax.groups import exchange_groups, gather_groups, split
from shardmap_torch.ops.arguments import Axis, each_leaf, read_dim
from shardmap_torch.types import TypeLike

X = TypeVar("X")


def psum(
    x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike | None = None
) -> X:
    """Sums `x` over the ranks of `axis_name`; every rank gets the same sum, of type I.

    A Python number is equal on all ranks: it is multiplied by their number, and `psum(1, axis)` is
    the axis size. Booleans are counted, as int64. With `src` I or R the result is n*x, computed
    locally.

    Shape: unchanged. Types: V or P becomes I, with groups V. Backward: the cotangent as it is; with
    groups the sum of the group's. Sends 2(n-1)/n * x.nbytes per rank; with groups of g ranks
    (g-1) * x.nbytes.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, groups that are unequal or not a partition.

    Source: `jax.lax.psum`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> @shard_map(mesh=mesh, in_specs=(P("dp"),), out_specs=P())
        ... def mean(x):
        ...     return lax.psum(x.sum(), "dp") / lax.psum(len(x), "dp")
        >>> mean(torch.arange(8.0))
        tensor(3.5000)
    """
    arguments = read("psum", axis_name, src, ANY, axis_index_groups)

    def one(leaf: Tensor) -> Tensor:
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        if arguments.groups:
            every = gather_groups(arguments.varying(leaf), arguments.axes, arguments.groups)
            return every.sum(0, dtype=leaf.dtype)
        source = arguments.source(leaf)
        # Along axes with equal values n copies are added by a product, along the others by a sum.
        total = leaf * arguments.num_along(source.equal) if source.equal else leaf
        return combined(total, source, arguments.scope, "sum")

    return each_leaf_or_number("psum", x, one, lambda number: number * arguments.num_members)


def pmean(
    x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike | None = None
) -> X:
    """Averages `x` over the ranks of `axis_name`: `psum` divided by the number of ranks.

    Shape: unchanged; integers become floats, as by `/`. Types, backward and bytes: as `psum`.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: as `psum`.

    Source: `jax.lax.pmean`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmean(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([1.5000])
    """
    total = psum(x, axis_name, axis_index_groups=axis_index_groups, src=src)
    num_members = read("pmean", axis_name, src, ANY, axis_index_groups).num_members
    return each_leaf_or_number(
        "pmean", total, lambda leaf: leaf / num_members, lambda number: number / num_members
    )


def psum_scatter(
    x: X,
    axis_name: Axis,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    src: TypeLike | None = None,
) -> X:
    """Sums `x` over the ranks of `axis_name` and leaves each its shard along `scatter_dimension`.

    Shape: `scatter_dimension` must be n, the number of ranks (or of a group's members), and goes
    away; with `tiled=True` its size d becomes d/n. Types: V or P becomes V. Backward: all_gather.
    Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        scatter_dimension: the dim to split.
        axis_index_groups: positions along the axis, in groups of equal size.
        tiled: whether the dim stays.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, a dim that cannot be split, bad groups.

    Source: `jax.lax.psum_scatter`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("dp",), kind="simulated")
        >>> f = lambda x: lax.psum_scatter(x, "dp", tiled=True)
        >>> shard_map(f, mesh=mesh, in_specs=P("dp"), out_specs=P("dp"))(torch.arange(4.0))
        tensor([2., 4.])
    """
    arguments = read("psum_scatter", axis_name, src, ANY, axis_index_groups)
    axes, groups = arguments.axes, arguments.groups

    def one(leaf: Tensor) -> Tensor:
        leaf = arguments.varying(leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf)
        if not groups:
            return ops.reduce_scatter(leaf, axes, dim=scatter_dimension, tiled=tiled)
        at = read_dim("psum_scatter", "scatter_dimension", scatter_dimension, leaf.ndim)
        parts = split("psum_scatter", "scatter_dimension", leaf, at, axes, groups, tiled)
        return exchange_groups(parts, axes, groups).sum(0, dtype=leaf.dtype)

    return each_leaf("psum_scatter", x, one)

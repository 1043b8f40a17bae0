"""Collectives of `jax.lax` that move values without adding them: all_gather, ppermute, ..."""

from collections.abc import Sequence
from typing import TypeVar

from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.errors import CollectiveError, show
from shardmap_torch.lax.arguments import (
    EQUAL_OR_VARYING,
    WORDS,
    Groups,
    copied,
    read,
    read_type,
    spread,
)
from shardmap_torch.lax.groups import exchange_groups, gather_groups, join, split
from shardmap_torch.ops.arguments import Axis, each_leaf, read_dim, read_items, shown
from shardmap_torch.ops.reduce import check_split
from shardmap_torch.types import I, R, TypeLike, V

X = TypeVar("X")


def all_gather(
    x: X,
    axis_name: Axis,
    *,
    axis_index_groups: Groups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: TypeLike = "varying",
    src: TypeLike | None = None,
) -> X:
    """Concatenates or stacks the values of all ranks of `axis_name`; every rank gets the result.

    Shape: a new dim of size n stands at `axis`; with `tiled=True` the dim `axis`, of size d,
    becomes n*d. Types: V becomes `to`. Backward: reduce_scatter; for "invarying" the rank's own
    slice, without communication. Sends (n-1) * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        axis: the dim to concatenate along, or the position of the new dim.
        tiled: whether to concatenate along an existing dim; otherwise stacks along a new one.
        to: "varying" (the ranks use their copies in different ways), "reduced" (the same, and the
            copies are known to be equal) or "invarying" (all repeat one computation).
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis or dim, bad groups, or groups with a `to` that
            promises equal values.

    Source: `jax.lax.all_gather`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.all_gather(x, "tp", to="invarying")
        >>> shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P())(torch.arange(4.0))
        tensor([[0., 1.],
                [2., 3.]])
    """
    arguments = read("all_gather", axis_name, src, EQUAL_OR_VARYING, axis_index_groups)
    axes, groups = arguments.axes, arguments.groups
    target = read_type("all_gather", "to", to, (V, R, I))
    if groups and target != V:
        raise CollectiveError(
            f"all_gather: to={WORDS[target]!r} promises one value on all ranks of {shown(axes)}, "
            "but with axis_index_groups each group has its own; leave to='varying'."
        )

    def one(leaf: Tensor) -> Tensor:
        leaf = arguments.varying(leaf)
        if groups:
            at = read_dim("all_gather", "axis", axis, leaf.ndim + (not tiled))
            return join(gather_groups(leaf, axes, groups), at, tiled)
        if target != V:
            every = ops.all_gather(leaf, axes, dim=axis, dst=target, tiled=tiled)
            return spread(every, axes, arguments.scope) if target == I else every
        copies = ops.all_gather(leaf, axes, dim=axis, dst=R, tiled=tiled)
        return copied(copies, arguments)

    return each_leaf("all_gather", x, one)


def all_to_all(
    x: X,
    axis_name: Axis,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    src: TypeLike | None = None,
) -> X:
    """Splits each rank's value along `split_axis`, sends block j to rank j, joins what arrives.

    Shape: `split_axis` must be n, the number of ranks (or of a group's members), and goes away; a
    new dim of size n stands at `concat_axis` of the result. With `tiled=True` `split_axis` d
    becomes d/n and `concat_axis` d becomes n*d, and they may be the same. Types: V becomes V.
    Backward: all_to_all with the dims swapped. Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        split_axis: dim to split.
        concat_axis: dim to concatenate along.
        axis_index_groups: positions along the axis, in groups of equal size.
        tiled: whether the dims stay.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis or dim, a dim that cannot be split, bad
            groups.

    Source: `jax.lax.all_to_all`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.all_to_all(x, "tp", 1, 0)
        >>> g = shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P(None, "tp"))
        >>> g(torch.arange(4.0).reshape(2, 2))
        tensor([[0., 1.],
                [2., 3.]])
    """
    arguments = read("all_to_all", axis_name, src, EQUAL_OR_VARYING, axis_index_groups)
    axes, groups, num_ranks = arguments.axes, arguments.groups, arguments.num_ranks

    def one(leaf: Tensor) -> Tensor:
        leaf = arguments.varying(leaf)
        at = read_dim("all_to_all", "split_axis", split_axis, leaf.ndim)
        concat = read_dim("all_to_all", "concat_axis", concat_axis, leaf.ndim)
        if groups:
            parts = split("all_to_all", "split_axis", leaf, at, axes, groups, tiled)
            return join(exchange_groups(parts, axes, groups), concat, tiled)
        check_split("all_to_all", "split_axis", leaf.shape[at], axes, num_ranks, tiled, None)
        return ops.all_to_all(leaf, axes, split_dim=at, concat_dim=concat, tiled=tiled)

    return each_leaf("all_to_all", x, one)


def ppermute(
    x: X, axis_name: Axis, perm: Sequence[tuple[int, int]], *, src: TypeLike | None = None
) -> X:
    """Sends the value of rank s to rank t for every pair (s, t); other ranks get zeros.

    Shape: unchanged. Types: V stays V. Backward: ppermute by the inverse pairs. A rank that is a
    source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        perm: pairs (source, target), positions along the axis.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, no such rank, or a rank that is the source
            or the target of two pairs.

    Source: `jax.lax.ppermute`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.ppermute(x, "pp", [(0, 1), (1, 2)])
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(1.0, 4.0))
        tensor([0., 1., 2.])
    """
    arguments = read("ppermute", axis_name, src, EQUAL_OR_VARYING)
    return each_leaf(
        "ppermute", x, lambda leaf: ops.ppermute(arguments.varying(leaf), arguments.axes, perm)
    )


def pshuffle(x: X, axis_name: Axis, perm: Sequence[int], *, src: TypeLike | None = None) -> X:
    """Gives rank i the value of rank `perm[i]`.

    Shape: unchanged. Types: V stays V. Backward: pshuffle by the inverse permutation. Sends
    x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        perm: for each position along the axis, the position that its value comes from.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, or `perm` is no permutation of the ranks.

    Source: `jax.lax.pshuffle`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.pshuffle(x, "pp", [2, 0, 1])
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(3.0))
        tensor([2., 0., 1.])
    """
    arguments = read("pshuffle", axis_name, src, EQUAL_OR_VARYING)
    sources = read_items("pshuffle", "perm", perm)
    numbers = all(isinstance(rank, int) for rank in sources)
    if not numbers or sorted(sources) != list(range(arguments.num_ranks)):
        raise CollectiveError(
            f"pshuffle: perm={show(list(sources))} is no permutation of the {arguments.num_ranks} "
            f"ranks of {shown(arguments.axes)}."
        )
    pairs = [(source, target) for target, source in enumerate(sources)]
    return each_leaf(
        "pshuffle", x, lambda leaf: ops.ppermute(arguments.varying(leaf), arguments.axes, pairs)
    )


def pswapaxes(
    x: X,
    axis_name: Axis,
    axis: int,
    *,
    axis_index_groups: Groups | None = None,
    src: TypeLike | None = None,
) -> X:
    """Swaps the mesh axis with the dim `axis`: `all_to_all(x, axis_name, axis, axis)`.

    Shape: unchanged; `axis` must have as many rows as there are ranks. Types: V stays V. Backward:
    itself. Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        axis: the dim to swap.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: as `all_to_all`.

    Source: `jax.lax.pswapaxes`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda x: lax.pswapaxes(x, "tp", 1)
        >>> g = shard_map(f, mesh=mesh, in_specs=P("tp"), out_specs=P("tp"))
        >>> g(torch.arange(4.0).reshape(2, 2))
        tensor([[0., 2.],
                [1., 3.]])
    """
    return all_to_all(x, axis_name, axis, axis, axis_index_groups=axis_index_groups, src=src)


def pbroadcast(x: X, axis_name: Axis, source: int, *, src: TypeLike | None = None) -> X:
    """Gives every rank of `axis_name` the value of rank `source`; the copies are typed V.

    `shardmap_torch.broadcast` types them R or I.

    Shape: unchanged. Types: V stays V. Backward: the all-reduced cotangent on `source`, zero
    elsewhere. The source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        source: position along the axis.
        src: the type of x along the axis; the checker knows it, and V is taken without one.

    Raises:
        CollectiveError: outside a body, unknown axis, or no such rank.

    Source: `jax.lax.pbroadcast`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((3,), ("pp",), kind="simulated")
        >>> f = lambda x: lax.pbroadcast(x, "pp", 2)
        >>> shard_map(f, mesh=mesh, in_specs=P("pp"), out_specs=P("pp"))(torch.arange(3.0))
        tensor([2., 2., 2.])
    """
    arguments = read("pbroadcast", axis_name, src, EQUAL_OR_VARYING)

    def one(leaf: Tensor) -> Tensor:
        copies = ops.broadcast(arguments.varying(leaf), arguments.axes, source, dst=R)
        return copied(copies, arguments)

    return each_leaf("pbroadcast", x, one)

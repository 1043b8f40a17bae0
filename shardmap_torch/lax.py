"""The collectives of `jax.lax`: its names, arguments and defaults.

As in `jax.shard_map` with `check_vma=True`, an operand that is equal on all ranks is cast to a
varying one first, so that `psum` of it is n times the value. These are the only implicit casts in a
body. What a cast does to gradients depends on the type that was cast, and values carry no type at
run time, so `src=`, which JAX has no need of, says it; by default operands vary. Types are I, R, V,
Partial or JAX's words for them: "invarying", "reduced", "varying", "unreduced".

`axis_index_groups` splits an axis into groups of equal size, each with its own result. The result
therefore varies over the axis, whatever it would be without groups. It is made of one `ppermute`
for each member but one: as many bytes as the data needs, in g-1 messages.
"""

from collections.abc import Callable, Mapping, Sequence
from numbers import Number
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

import torch
from torch import Tensor

from shardmap_torch import ops
from shardmap_torch.backend import Scope
from shardmap_torch.errors import CollectiveError
from shardmap_torch.ops.arguments import Axis, each_leaf, read_axes, read_dim, shown
from shardmap_torch.ops.index import axis_index, axis_size
from shardmap_torch.ops.reduce import check_split
from shardmap_torch.tree import map_leaves
from shardmap_torch.types import AxisType, I, Partial, R, TypeLike, V

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_size",
    "pbroadcast",
    "pcast",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "pshuffle",
    "psum",
    "psum_scatter",
    "pswapaxes",
    "pvary",
]

X = TypeVar("X")

Groups: TypeAlias = Sequence[Sequence[int]]
"""Positions along an axis, every one in exactly one group, all groups of one size."""

_WORDS: Final[Mapping[AxisType, str]] = MappingProxyType(
    {I: "invarying", R: "reduced", V: "varying", Partial: "unreduced"}
)
_EQUAL_OR_VARYING: Final = (I, R, V)


# ----------------------------------------------------------------------------------- sums


def psum(x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike = V) -> X:
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
        src: the type of x along the axis.

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
    axes, scope, kind = _read("psum", axis_name, src, (I, R, V, Partial))
    groups = _read_groups("psum", axis_index_groups, axes, scope)
    num_added = len(groups[0]) if groups else _num_ranks(axes, scope)

    def one(leaf: Tensor) -> Tensor:
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        if groups:
            return _gather_groups(_vary(leaf, axes, kind), axes, groups).sum(0, dtype=leaf.dtype)
        if kind in (I, R):
            return _to_invariant(leaf * num_added, axes, kind)
        return ops.all_reduce(leaf, axes, dst=I)

    return _each_leaf_or_number("psum", x, one, lambda number: number * num_added)


def pmean(
    x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike = V
) -> X:
    """Averages `x` over the ranks of `axis_name`: `psum` divided by the number of ranks.

    Shape: unchanged; integers become floats, as by `/`. Types, backward and bytes: as `psum`.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis.

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
    axes, scope = read_axes("pmean", axis_name)
    groups = _read_groups("pmean", axis_index_groups, axes, scope)
    num_added = len(groups[0]) if groups else _num_ranks(axes, scope)
    return _each_leaf_or_number(
        "pmean", total, lambda leaf: leaf / num_added, lambda number: number / num_added
    )


def psum_scatter(
    x: X,
    axis_name: Axis,
    *,
    scatter_dimension: int = 0,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    src: TypeLike = V,
) -> X:
    """Sums `x` over the ranks of `axis_name` and leaves each its piece of `scatter_dimension`.

    Shape: `scatter_dimension` must be n, the number of ranks (or of a group's members), and goes
    away; with `tiled=True` its size d becomes d/n. Types: V or P becomes V. Backward: all_gather.
    Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        scatter_dimension: the dim to split.
        axis_index_groups: positions along the axis, in groups of equal size.
        tiled: whether the dim stays.
        src: the type of x along the axis.

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
    axes, scope, kind = _read("psum_scatter", axis_name, src, (I, R, V, Partial))
    groups = _read_groups("psum_scatter", axis_index_groups, axes, scope)

    def one(leaf: Tensor) -> Tensor:
        leaf = leaf.to(torch.int64) if leaf.dtype == torch.bool else leaf
        leaf = leaf if kind == Partial else _vary(leaf, axes, kind)
        if not groups:
            return ops.reduce_scatter(leaf, axes, dim=scatter_dimension, tiled=tiled)
        at = read_dim("psum_scatter", "scatter_dimension", scatter_dimension, leaf.ndim)
        parts = _split("psum_scatter", "scatter_dimension", leaf, at, axes, groups, tiled)
        return _exchange_groups(parts, axes, groups).sum(0, dtype=leaf.dtype)

    return each_leaf("psum_scatter", x, one)


# -------------------------------------------------------------------------------- extrema


def pmax(x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike = V) -> X:
    """Takes the largest value over the ranks of `axis_name`; every rank gets it, of type I.

    Unlike JAX's, it has a derivative: the ranks that hold the extremum share it evenly.

    Shape: unchanged. Types: V becomes I, with groups V. Backward: the cotangent where the extremum
    was. Sends 2(n-1)/n * x.nbytes per rank; with groups of g ranks (g-1) * x.nbytes; nothing where
    `src` is I or R.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis.

    Raises:
        CollectiveError: outside a body, unknown axis, bad groups, or `src` Partial, whose ranks
            hold addends.

    Source: `jax.lax.pmax`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmax(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([3.])
    """
    return _extremum("max", x, axis_name, axis_index_groups, src)


def pmin(x: X, axis_name: Axis, *, axis_index_groups: Groups | None = None, src: TypeLike = V) -> X:
    """Takes the smallest value over the ranks of `axis_name`; see `pmax`.

    Shape, types, backward, bytes and errors: as `pmax`.

    Args:
        x: a tensor, a number, or a pytree of them.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis.

    Raises:
        CollectiveError: as `pmax`.

    Source: `jax.lax.pmin`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((4,), ("dp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pmin(x, "dp"), mesh=mesh, in_specs=P("dp"), out_specs=P())
        >>> f(torch.arange(4.0))
        tensor([0.])
    """
    return _extremum("min", x, axis_name, axis_index_groups, src)


def _extremum(op: str, x: X, axis_name: Axis, axis_index_groups: Groups | None, src: TypeLike) -> X:
    name = f"p{op}"
    axes, scope, kind = _read(name, axis_name, src, _EQUAL_OR_VARYING)
    groups = _read_groups(name, axis_index_groups, axes, scope)

    def one(leaf: Tensor) -> Tensor:
        if groups:
            every = _gather_groups(_vary(leaf, axes, kind), axes, groups)
            return every.amax(0) if op == "max" else every.amin(0)
        if kind in (I, R):
            return _to_invariant(leaf, axes, kind)
        return ops.all_reduce(leaf, axes, dst=I, op="max" if op == "max" else "min")

    return _each_leaf_or_number(name, x, one, lambda number: number)


# ------------------------------------------------------------------------------- movement


def all_gather(
    x: X,
    axis_name: Axis,
    *,
    axis_index_groups: Groups | None = None,
    axis: int = 0,
    tiled: bool = False,
    to: TypeLike = "varying",
    src: TypeLike = V,
) -> X:
    """Joins the values of all ranks of `axis_name`; every rank gets the whole.

    Shape: a new dim of size n stands at `axis`; with `tiled=True` the dim `axis`, of size d,
    becomes n*d. Types: V becomes `to`. Backward: reduce_scatter; for "invarying" the rank's own
    slice, without communication. Sends (n-1) * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        axis_index_groups: positions along the axis, in groups of equal size.
        axis: where to join.
        tiled: whether to join along a dim that exists.
        to: "varying" (the ranks use their copies in different ways), "reduced" (the same, and the
            copies are known to be equal) or "invarying" (all repeat one computation).
        src: the type of x along the axis.

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
    axes, scope, kind = _read("all_gather", axis_name, src, _EQUAL_OR_VARYING)
    target = _read_type("all_gather", "to", to, (V, R, I))
    groups = _read_groups("all_gather", axis_index_groups, axes, scope)
    if groups and target != V:
        raise CollectiveError(
            f"all_gather: to={_WORDS[target]!r} promises one value on all ranks of {shown(axes)}, "
            "but with axis_index_groups each group has its own; leave to='varying'."
        )

    def one(leaf: Tensor) -> Tensor:
        leaf = _vary(leaf, axes, kind)
        if groups:
            at = read_dim("all_gather", "axis", axis, leaf.ndim + (not tiled))
            return _join(_gather_groups(leaf, axes, groups), at, tiled)
        if target != V:
            return ops.all_gather(leaf, axes, dim=axis, dst=target, tiled=tiled)
        whole = ops.all_gather(leaf, axes, dim=axis, dst=R, tiled=tiled)
        return _vary(whole, axes, R)

    return each_leaf("all_gather", x, one)


def all_to_all(
    x: X,
    axis_name: Axis,
    split_axis: int,
    concat_axis: int,
    *,
    axis_index_groups: Groups | None = None,
    tiled: bool = False,
    src: TypeLike = V,
) -> X:
    """Splits each rank's value along `split_axis`, sends piece j to rank j, joins what arrives.

    Shape: `split_axis` must be n, the number of ranks (or of a group's members), and goes away; a
    new dim of size n stands at `concat_axis` of the result. With `tiled=True` `split_axis` d
    becomes d/n and `concat_axis` d becomes n*d, and they may be the same. Types: V becomes V.
    Backward: all_to_all with the dims swapped. Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        split_axis: dim to split.
        concat_axis: dim to join along.
        axis_index_groups: positions along the axis, in groups of equal size.
        tiled: whether the dims stay.
        src: the type of x along the axis.

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
    axes, scope, kind = _read("all_to_all", axis_name, src, _EQUAL_OR_VARYING)
    groups = _read_groups("all_to_all", axis_index_groups, axes, scope)
    num_ranks = _num_ranks(axes, scope)

    def one(leaf: Tensor) -> Tensor:
        leaf = _vary(leaf, axes, kind)
        split = read_dim("all_to_all", "split_axis", split_axis, leaf.ndim)
        concat = read_dim("all_to_all", "concat_axis", concat_axis, leaf.ndim)
        if groups:
            parts = _split("all_to_all", "split_axis", leaf, split, axes, groups, tiled)
            return _join(_exchange_groups(parts, axes, groups), concat, tiled)
        check_split("all_to_all", "split_axis", leaf.shape[split], axes, num_ranks, tiled, None)
        if tiled and split == concat:
            # The chunks of one dim are transposed with the ranks: stack them, and join again.
            chunks = leaf.unflatten(split, (num_ranks, leaf.shape[split] // num_ranks))
            moved = ops.all_to_all(chunks, axes, split_dim=split, concat_dim=split, tiled=False)
            return _join(moved.movedim(split, 0), split, tiled=True)
        return ops.all_to_all(leaf, axes, split_dim=split, concat_dim=concat, tiled=tiled)

    return each_leaf("all_to_all", x, one)


def ppermute(x: X, axis_name: Axis, perm: Sequence[tuple[int, int]], *, src: TypeLike = V) -> X:
    """Sends the value of rank s to rank t for every pair (s, t); who is no target gets zeros.

    Shape: unchanged. Types: V stays V. Backward: ppermute by the inverse pairs. A rank that is a
    source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        perm: pairs (source, target), positions along the axis.
        src: the type of x along the axis.

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
    axes, _, kind = _read("ppermute", axis_name, src, _EQUAL_OR_VARYING)
    return ops.ppermute(_vary(x, axes, kind), axes, perm)


def pshuffle(x: X, axis_name: Axis, perm: Sequence[int], *, src: TypeLike = V) -> X:
    """Gives rank i the value of rank `perm[i]`.

    Shape: unchanged. Types: V stays V. Backward: pshuffle by the inverse permutation. Sends
    x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        perm: for each position along the axis, the position that its value comes from.
        src: the type of x along the axis.

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
    axes, scope, kind = _read("pshuffle", axis_name, src, _EQUAL_OR_VARYING)
    num_ranks = _num_ranks(axes, scope)
    if sorted(perm) != list(range(num_ranks)):
        raise CollectiveError(
            f"pshuffle: perm={list(perm)} is no permutation of the {num_ranks} ranks of "
            f"{shown(axes)}."
        )
    pairs = [(source, target) for target, source in enumerate(perm)]
    return ops.ppermute(_vary(x, axes, kind), axes, pairs)


def pswapaxes(
    x: X, axis_name: Axis, axis: int, *, axis_index_groups: Groups | None = None, src: TypeLike = V
) -> X:
    """Swaps the mesh axis with the dim `axis`: `all_to_all(x, axis_name, axis, axis)`.

    Shape: unchanged; `axis` must have as many rows as there are ranks. Types: V stays V. Backward:
    itself. Sends (n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        axis: the dim to swap.
        axis_index_groups: positions along the axis, in groups of equal size.
        src: the type of x along the axis.

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


def pbroadcast(x: X, axis_name: Axis, source: int, *, src: TypeLike = V) -> X:
    """Gives every rank of `axis_name` the value of rank `source`; the copies are typed V.

    `shardmap_torch.broadcast` types them R or I.

    Shape: unchanged. Types: V stays V. Backward: the all-reduced cotangent on `source`, zero
    elsewhere. The source sends x.nbytes.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        source: position along the axis.
        src: the type of x along the axis.

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
    axes, _, kind = _read("pbroadcast", axis_name, src, _EQUAL_OR_VARYING)
    copies = ops.broadcast(_vary(x, axes, kind), axes, source, dst=R)
    return _vary(copies, axes, R)


# ---------------------------------------------------------------------------------- casts

_CASTS: Final[Mapping[tuple[AxisType, AxisType], Callable[[Any, Axis], Any]]] = MappingProxyType(
    {
        (I, V): lambda x, axes: _vary(x, axes, I),
        (I, R): lambda x, axes: ops.convert(x, axes, src=I, dst=R),
        (R, V): lambda x, axes: _vary(x, axes, R),
        (V, Partial): lambda x, axes: ops.reinterpret(x, axes, src=V, dst=Partial),
    }
)
"""What JAX's pcast can do. None of them changes the value that a rank holds."""


def pcast(x: X, axis_name: Axis, *, to: TypeLike, src: TypeLike | None = None) -> X:
    """Changes the type of `x` along `axis_name`; the ranks' values stay as they are.

    | src -> to | backward |
    |---|---|
    | invarying -> varying, invarying -> reduced | all_reduce |
    | reduced -> varying | nothing |
    | varying -> unreduced | nothing |

    Shape: unchanged. Sends nothing; where the backward is an all-reduce that sends
    2(n-1)/n * x.nbytes per rank.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.
        to: "varying", "reduced" or "unreduced".
        src: the type of x along the axis; by default "varying" for "unreduced", else "invarying".

    Raises:
        CollectiveError: outside a body, unknown axis, or no such cast.

    Source: `jax.lax.pcast`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = lambda w, x: lax.psum((lax.pcast(w, "tp", to="varying") * x).sum(), "tp")
        >>> g = shard_map(f, mesh=mesh, in_specs=(P(invariant="tp"), P("tp")), out_specs=P())
        >>> torch.func.grad(g)(torch.tensor(1.0), torch.arange(4.0))
        tensor(6.)
    """
    target = _read_type("pcast", "to", to, (V, R, Partial))
    source = _read_type("pcast", "src", src or (V if target == Partial else I), (I, R, V, Partial))
    axes, _ = read_axes("pcast", axis_name)
    cast = _CASTS.get((source, target))
    if cast is None:
        known = ", ".join(f"{_WORDS[a]} -> {_WORDS[b]}" for a, b in _CASTS)
        raise CollectiveError(
            f"pcast does not go from {_WORDS[source]} to {_WORDS[target]}; it goes {known}."
        )
    changed: X = cast(x, axes)
    return changed


def pvary(x: X, axis_name: Axis) -> X:
    """Makes an invariant `x` a varying one: `pcast(x, axis_name, to="varying")`.

    Shape: unchanged. Types: I becomes V. Backward: all_reduce. Sends nothing forward.

    Args:
        x: a tensor or a pytree of tensors.
        axis_name: an axis name, or several that act as one.

    Raises:
        CollectiveError: outside a body, or unknown axis.

    Source: `jax.lax.pvary`.

    Example:
        >>> import torch
        >>> from shardmap_torch import P, lax, make_mesh, shard_map
        >>> mesh = make_mesh((2,), ("tp",), kind="simulated")
        >>> f = shard_map(lambda x: lax.pvary(x, "tp"), mesh=mesh, in_specs=P(), out_specs=P("tp"))
        >>> f(torch.ones(1))
        tensor([1., 1.])
    """
    return pcast(x, axis_name, to=V, src=I)


def _vary(x: X, axes: Axis, kind: AxisType) -> X:
    if kind == V:
        return x
    x = ops.convert(x, axes, src=I, dst=R) if kind == I else x
    return ops.reinterpret(x, axes, src=R, dst=V)


def _to_invariant(x: Tensor, axes: Axis, kind: AxisType) -> Tensor:
    return x if kind == I else ops.convert(x, axes, src=R, dst=I)


# ------------------------------------------------------------------------------ arguments


def _read(
    name: str, axis_name: Axis, src: TypeLike, allowed: Sequence[AxisType]
) -> tuple[tuple[str, ...], Scope, AxisType]:
    axes, scope = read_axes(name, axis_name)
    return axes, scope, _read_type(name, "src", src, allowed)


def _read_type(name: str, word: str, value: TypeLike, allowed: Sequence[AxisType]) -> AxisType:
    for kind in allowed:
        if value == kind or value in (kind.kind, _WORDS[kind]):
            return kind
    known = ", ".join(_WORDS[kind] for kind in allowed)
    raise CollectiveError(f"{name}: {word}={value!r} is none of {known}.")


def _num_ranks(axes: tuple[str, ...], scope: Scope) -> int:
    return scope.backend.mesh.num_ranks(axes)


def _each_leaf_or_number(
    name: str, x: X, on_tensor: Callable[[Tensor], Tensor], on_number: Callable[[Any], Any]
) -> X:
    def one(leaf: Any) -> Any:
        return on_number(leaf) if isinstance(leaf, Number) else each_leaf(name, leaf, on_tensor)

    result: X = map_leaves(one, x)
    return result


# --------------------------------------------------------------------------------- groups


def _read_groups(
    name: str, groups: Groups | None, axes: tuple[str, ...], scope: Scope
) -> tuple[tuple[int, ...], ...]:
    """The groups as tuples; none at all for None."""
    if groups is None:
        return ()
    read, num_ranks = tuple(tuple(group) for group in groups), _num_ranks(axes, scope)
    if sorted(rank for group in read for rank in group) != list(range(num_ranks)):
        raise CollectiveError(
            f"{name}: axis_index_groups={[list(group) for group in read]} must name each of the "
            f"{num_ranks} ranks of {shown(axes)} exactly once."
        )
    if len({len(group) for group in read}) > 1:
        raise CollectiveError(
            f"{name}: axis_index_groups={[list(group) for group in read]} have different sizes. "
            "All ranks run one program on values of one shape, so groups must be equally large."
        )
    return read


def _gather_groups(x: Tensor, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]) -> Tensor:
    """The values of the group's members along a new leading dim, in the group's order."""
    size = len(groups[0])
    arrived = [x, *(ops.ppermute(x, axes, _round(groups, step)) for step in range(1, size))]
    return _in_group_order(arrived, axes, groups)


def _exchange_groups(
    parts: Tensor, axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> Tensor:
    """From `parts[j]`, meant for the group's member j, to what each member meant for this rank."""
    size = len(groups[0])
    position = _position(axes, groups, parts.device)
    arrived = []
    for step in range(size):
        part = parts[((position + step) % size).reshape(1)].squeeze(0)
        arrived.append(ops.ppermute(part, axes, _round(groups, step)) if step else part)
    return _in_group_order(arrived, axes, groups)


def _round(groups: tuple[tuple[int, ...], ...], step: int) -> list[tuple[int, int]]:
    """Every member sends to the one `step` places on."""
    size = len(groups[0])
    return [(group[j], group[(j + step) % size]) for group in groups for j in range(size)]


def _in_group_order(
    arrived: Sequence[Tensor], axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...]
) -> Tensor:
    """`arrived[k]` came from k places before this rank; one order for all makes sums equal."""
    size, device = len(groups[0]), arrived[0].device
    steps = (_position(axes, groups, device) - torch.arange(size, device=device)) % size
    return torch.stack(list(arrived))[steps]


def _position(
    axes: tuple[str, ...], groups: tuple[tuple[int, ...], ...], device: torch.device
) -> Tensor:
    """This rank's place in its group."""
    places = {rank: place for group in groups for place, rank in enumerate(group)}
    table = torch.tensor([places[rank] for rank in range(len(places))], device=device)
    return table[axis_index(axes).reshape(1)].squeeze(0)


def _split(
    name: str,
    word: str,
    x: Tensor,
    dim: int,
    axes: tuple[str, ...],
    groups: tuple[tuple[int, ...], ...],
    tiled: bool,
) -> Tensor:
    size, length = len(groups[0]), x.shape[dim]
    if length % size or (not tiled and length != size):
        need = "a multiple of" if tiled else "exactly"
        raise CollectiveError(
            f"{name}: {word} has size {length}; it must be {need} {size}, the size of the "
            f"axis_index_groups of {shown(axes)}."
        )
    split = x.unflatten(dim, (size, length // size)) if tiled else x
    return split.movedim(dim, 0)


def _join(stacked: Tensor, dim: int, tiled: bool) -> Tensor:
    placed = stacked.movedim(0, dim)
    return placed.flatten(dim, dim + 1) if tiled else placed
